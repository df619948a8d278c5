"""Tests of remat: graphs.py builds joint graphs, checks.py judges cuts, plans and partitions."""
