"""FST in other training frameworks: each module is thin, and the only importer of its library."""
