"""Stack-100M: from raw text to a chat model of about 100M parameters, on one CPU, one GPU or many."""
