"""Operations on one row at a time: norms, rotary embedding, activations."""
