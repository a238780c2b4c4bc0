"""One self-contained HTML page from runs, ablations and analyses.

`document` is the format in which analyses and ablations hand over tables and figures, `runs` reads
the folders of `fst train`, `html` writes the page. The command line is `cli`, `fst report`.
"""
