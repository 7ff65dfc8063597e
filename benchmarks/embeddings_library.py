"""The process in which `benchmarks.embeddings` has sentence-transformers compute."""

from multiprocessing.connection import Connection


def run_library(pipe: Connection, model: str, num_threads: int) -> None:
    """Compute the vectors of texts that come through a pipe, with sentence-transformers."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(num_threads)
    loaded = SentenceTransformer(model, device="cpu")
    pipe.send(None)
    while (texts := pipe.recv()) is not None:
        pipe.send(loaded.encode(texts, batch_size=32, show_progress_bar=False))
