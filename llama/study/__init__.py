"""The study of RoPE: claims about the decoder, each checked by running the decoder's own code.

report.py defines the report of a topic and figure.py a figure. topics/ has one file per topic, errata/ one proof per
mistake in the notes. Only the command line imports this folder.
"""
