"""What a step of batch bookkeeping costs, here and with the methods that engines use.

Owns: field sets, peers' methods written from their descriptions, timing in interleaved rounds.
Never: is imported by the library, or judges a figure: bars are the reader's.
"""
