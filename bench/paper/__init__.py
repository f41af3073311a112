"""The figures and tables of the SwiftSpec paper's evaluation, on the models and the machine at hand."""
