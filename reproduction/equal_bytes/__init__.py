"""The table at equal bytes: what is asked (`suite`), of whom (`cells`), how it is run (`batches`), and what is made of the results."""
