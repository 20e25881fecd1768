"""The course on RoPE: questions answered by running the decoder's own code.

topics/ has one file per topic; report.py defines its report and figure.py its figures. measures.py, encodings.py,
needle.py and perplexity.py compute what topics report, results/ has stored numbers of long runs. bugs.py has the common
bugs and page.py the page to explore RoPE. Only the command line imports this folder.
"""
