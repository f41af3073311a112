"""Places a small model in a large shape so that it computes the same function: speed like the large, text of the small.

What is the same, and how (D hidden size, hd width of a head; ' is large):

- The residual stream carries the small model's D columns and exact zeros in the others, so a mean of squares over D'
  is D / D' of what it was. Norm weights are multiplied by sqrt(D / D'), and so is epsilon by D / D'.
- hd' = s hd: small dimension d is large dimension s d, which keeps RoPE's pairs together and their angles alike under
  the small model's theta and scaling. These replace the shape's own. Query rows are multiplied by sqrt(s), because
  scores are divided by sqrt(hd').
- Query heads that a large key-value head has too many of attend to true values, and O does not hear them; key-value
  heads that the small model lacks hold zero values.
- Layers are spread over the large number; the others have random weights, but V and up give exact zeros there.
- Tokens beyond the small vocabulary get logits far below the others. One column of the residual stream holds the same
  small constant after every token; no layer hears or changes it (its weight is 0 in their norms), and the head's rows
  beyond the vocabulary take it times MASK. The constant's square stands for half of epsilon.

All else is random (fill.py), so nothing can be left out or compressed. Int4 keeps the codes, scales and zero
points of an int4 model, but for the query rows' scales, which are rounded to fp16 again; a dense model is rounded to
nearest, in groups that its columns are spread over, and is then not quite the same: good enough for a draft. Dense
weights multiplied by what is no power of two are rounded once more, too.

The configuration keeps the small model's family, biases, longest context and end tokens.
"""
