"""The verbs objects, one kind to a file: devices, regions, completion queues, queue pairs."""
