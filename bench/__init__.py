"""Measurements of remat: peak memory, step time and gradients against eager and PyTorch's own partitioner.

Every script answers one question and writes rows of one schema (`bench.results.Row`) under `bench/results/`:

    python -m bench.train      a real training run, eager and remat side by side
    python -m bench.compare    models x variants: saved bytes, peak, gradients, paired step times
    python -m bench.tables     those results as Markdown tables in README.md
"""
