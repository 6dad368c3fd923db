"""FlexAttention: attention whose scores and mask are modified by Python functions.

Import public names from `regard`.
"""
