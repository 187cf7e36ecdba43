"""One click command a file: options in, one call to a stage module, a summary out."""
