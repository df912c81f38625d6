"""The paper: masking, clustering, student, teacher and losses as tensor mathematics."""
