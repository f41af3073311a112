"""Width expansion: places a small model in a large shape so that it computes the same function, at the speed of the
large model with the text of the small one.

Construction (D hidden size, hd head dimension; a prime marks the large model):

- The residual stream contains the small model's D columns and exact zeros in the others, so a mean of squares over D'
  is D / D' of the original. Norm weights are multiplied by sqrt(D / D'), and epsilon by D / D'.
- hd' = s hd. Small dimension d is large dimension s d, which keeps RoPE's pairs together and their angles equal under
  the small model's theta and scaling, which replace those of the shape. Query rows are multiplied by sqrt(s), because
  scores are divided by sqrt(hd').
- Surplus query heads of a large key-value head attend to real values, but O has zero weights for them. Key-value heads
  that the small model lacks have zero values.
- The small model's layers are spread over the large number. The other layers have random weights, but their V and up
  produce exact zeros.
- Tokens beyond the small vocabulary get logits far below the others. One column of the residual stream contains the
  same small constant for every token. No layer reads or changes it (its weight in their norms is 0), and the head's
  rows beyond the vocabulary multiply it by MASK. The square of the constant replaces half of epsilon.

All other weights are random (fill.py), so nothing can be skipped or compressed. Int4 retains the codes, scales and zero
points of an int4 model, except the scales of query rows, which are rounded to fp16 again. A dense model is rounded to
nearest in groups over which its columns are spread, so the function is only approximately the same, which suffices for
a draft. Dense weights multiplied by a factor that is not a power of two are also rounded once more.

The configuration retains the small model's family, biases, maximum context and end tokens.
"""
