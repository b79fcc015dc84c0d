"""A sweep: from a grid to records, a table and MLflow runs. ``driver.run_sweep`` is the whole of it."""
