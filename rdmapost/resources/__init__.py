"""The verbs objects, one type per file: devices, regions, completion queues, queue pairs."""
