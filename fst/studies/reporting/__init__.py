"""One self-contained HTML page from runs, ablations and analyses.

`document` is the format in which analyses and ablations hand over tables and figures, `runs` reads
the folders of tools/train.py, `html` writes the page. The command line is `cli`, tools/report.py.
"""
