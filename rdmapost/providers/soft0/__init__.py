"""soft0, the software device whose queue pairs are all in this process."""
