"""Packing: documents into rows of a fixed number of tokens.

flat.py            PackFlat: the parameters, checked, and the choice of a packer
fields.py          which fields are packed, by a rule about kinds
shape.py           rows from segments: positions, padding
wrap.py            a stream of tokens, cut at every row end
bins.py            whole documents in open bins; first_fit.py and best_fit.py choose the bin
best_fit_wrap.py   tight rows from a pool of candidates
domains.py         rows that keep components apart
ordered.py         windows of documents, put in another order before packing
assemble.py        packed rows, rebuilt from their documents after a restore
"""
