"""The exact planner: problem tables, formulation, solver, baselines, simulator, independent check."""
