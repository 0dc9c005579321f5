"""Random programs of work requests, run on two devices whose answers are compared.

``model`` is what a program is, ``generate`` makes random ones, ``run`` carries
one out on a device and writes down what happened, ``transcript`` compares two
such records, and ``deviations`` is the table of where a real device is known
to answer otherwise than the soft one.
"""
