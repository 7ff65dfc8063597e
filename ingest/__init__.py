"""How requests come in beside plain Kafka: the gateway, batch files, admission. Nothing here yet."""
