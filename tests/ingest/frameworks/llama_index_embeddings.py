# /// script
# requires-python = ">=3.11"
# dependencies = ["llama-index-embeddings-openai-like==0.4.0"]
# ///
"""LlamaIndex embeds texts and a query; the vectors are printed."""

import json
import sys

from llama_index.embeddings.openai_like import OpenAILikeEmbedding

url, model, *texts = sys.argv[1:]
embedding = OpenAILikeEmbedding(model_name=model, api_base=url, api_key="none")
sys.stdout.write(json.dumps([*embedding.get_text_embedding_batch(texts), embedding.get_query_embedding(texts[0])]))
