"""The places a block may be: each keeps the contract in contract.py."""
