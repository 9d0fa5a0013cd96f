//! Examples of `replay-runtime`, one story per file under `examples/`; the package's README lists them.
