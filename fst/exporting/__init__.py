"""Models in files that other programs read: `model` writes and checks, `formats` knows the files,
`consumers` says who can use a weight's zeros."""
