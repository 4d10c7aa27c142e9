"""One file beside each parser: honest inputs, mutations that know their structure, and a target.

A target takes the bytes of an input and a folder of its own. It returns if the input was taken and what came out is
right, it raises a ValueError or an OSError if the input was refused, and anything else is a find: another exception,
a wrong result (an AssertionError), a hang, or memory beyond that of the honest inputs. `campaign.py` runs them.

    python -m tests.fuzz.campaign network 1000 7      a thousand inputs of the seed 7
    python -m tests.fuzz.campaign network 1 7 123     number 123 of them alone
"""
