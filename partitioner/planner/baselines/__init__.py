"""Plans of the usual kinds, in the same tables as ours."""
