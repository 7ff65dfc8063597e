"""The bus: durable topics between the stages. `contract` says what it does; Kafka and Redis Streams do it."""
