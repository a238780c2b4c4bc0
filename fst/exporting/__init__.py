"""Files that other programs read: `model` writes and checks models, `formats` the files."""
