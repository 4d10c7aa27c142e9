"""Runs: spec (what a run is, and its id), store (its folder), job (doing it), sweep (a grid of runs)."""
