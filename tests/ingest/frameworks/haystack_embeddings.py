# /// script
# requires-python = ">=3.11"
# dependencies = ["haystack-ai==3.4.1"]
# ///
"""Haystack embeds documents and a query; the vectors are printed."""

import json
import os
import sys

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder

url, model, *texts = sys.argv[1:]
os.environ["OPENAI_API_KEY"] = "none"
documents = OpenAIDocumentEmbedder(model=model, api_base_url=url, progress_bar=False)
found = documents.run([Document(content=text) for text in texts])["documents"]
query = OpenAITextEmbedder(model=model, api_base_url=url).run(texts[0])["embedding"]
sys.stdout.write(json.dumps([*(document.embedding for document in found), query]))
