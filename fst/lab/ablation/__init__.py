"""Grids of training runs (settings × seeds) and the tables and curves made of them.

`grid` reads and checks the grid, `configs` makes the config of each run, `run` trains, `results`
reads what was logged, `table` and `plots` show it. The command line is `cli`, `fst ablate`.
"""
