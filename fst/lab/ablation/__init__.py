"""Grids of training runs (settings × seeds) and the table and curves made of them: `fst ablate`.

`grid` reads and checks the grid, `runs` plans and trains, `results` reads what was logged and
writes the page. The command line is `cli`.
"""
