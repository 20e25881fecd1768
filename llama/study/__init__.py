"""The study of RoPE: every claim as something that runs, on the very code that runs the model.

report.py says what a topic says, figure.py what a picture is, topics/ holds one file a topic, errata/ one proof a
mistake. Nothing else in the package imports from here.
"""
