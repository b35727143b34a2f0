"""`python -m benchmarks [name ...]`: what tsunax costs beside the same lines written by hand."""
