"""How long tests wait for other processes before they give up."""

PATIENCE = 900
"""Seconds for what takes ten to thirty alone: on a loaded machine it takes ten times as long."""
