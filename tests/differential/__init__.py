"""Random programs of work requests, run on two devices whose results are compared.

``model`` defines programs, ``generate`` draws random ones, ``run`` runs a program
on a device and records what happens, ``transcript`` compares two such records,
and ``deviations`` is the table of known differences between a real device and
the soft one.
"""
