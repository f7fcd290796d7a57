"""Parts of train_code_lm.py."""
