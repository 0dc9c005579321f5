/*
 * Recording what is posted, and retiring it (ring.h).
 *
 * Letting go of an entry may run any Python code: finalizers, which close
 * things, and may come here again.  So an entry leaves the ring before its
 * references are given up, one after another, and nothing is remembered across
 * that.
 */
#include "ring.h"

static int grow(struct rp_in_flight *q)
{
	struct ring *ring = q->ring;
	size_t size = ring->size ? 2 * ring->size : 16;
	struct entry *entries = PyMem_Malloc(size * sizeof(*entries));

	if (!entries) {
		PyErr_NoMemory();
		return -1;
	}
	for (size_t i = ring->dropped; i != ring->end; i++)
		entries[i & (size - 1)] = *entry_at(q, i);
	PyMem_Free(ring->entries);
	ring->entries = entries;
	ring->size = size;
	return 0;
}

/* Give up what the entries that are done refer to. */
void rp_ring_drop_done(struct rp_in_flight *q)
{
	struct ring *ring = q->ring;

	while (ring->dropped != ring->first) {
		struct entry entry = *entry_at(q, ring->dropped++);

		Py_DECREF(entry.wr_id);
		Py_DECREF(entry.refers_to);
	}
}

int rp_ring_add(struct rp_in_flight *q, PyObject *wr_id, PyObject *refers_to,
		uint64_t count)
{
	struct ring *ring = q->ring;
	struct entry *entry;

	if (ring->end - ring->dropped == ring->size && grow(q))
		return -1;
	entry = entry_at(q, ring->end++);
	entry->wr_id = Py_NewRef(wr_id);
	entry->refers_to = Py_NewRef(refers_to);
	entry->count = count;
	q->posted += count;
	return 0;
}

PyObject *rp_ring_complete(struct rp_in_flight *q, uint64_t ticket)
{
	struct ring *ring = q->ring;
	uint64_t ahead = (ticket - q->done) & UINT32_MAX;
	PyObject *wr_id = NULL;

	if (ahead >= q->posted - q->done)
		return NULL;
	q->done += ahead + 1;
	while (!wr_id && ring->first != ring->end) {
		struct entry *entry = entry_at(q, ring->first);
		uint64_t left = entry->count - q->begun;

		if (ahead < left) {
			wr_id = entry->wr_id;
			if (PyList_Check(wr_id))
				wr_id = PyList_GetItem(
					wr_id, (Py_ssize_t)(q->begun + ahead));
			Py_XINCREF(wr_id);
		}
		if (ahead + 1 < left) {
			q->begun += ahead + 1;
		} else {
			q->begun = 0;
			ring->first++;
			ahead -= ahead < left ? ahead : left;
		}
	}
	return wr_id;
}

void rp_ring_forget_last(struct rp_in_flight *q, uint64_t count)
{
	struct ring *ring = q->ring;

	while (count && ring->end != ring->first) {
		struct entry *last = entry_at(q, ring->end - 1), old = *last;

		if (old.count > count) {
			last->count -= count;
			q->posted -= count;
			return;
		}
		ring->end--;
		q->posted -= old.count;
		count -= old.count;
		Py_DECREF(old.wr_id);
		Py_DECREF(old.refers_to);
	}
}

void rp_ring_clear(struct rp_in_flight *q)
{
	q->done = q->posted;
	q->begun = 0;
	q->ring->first = q->ring->end;
	rp_ring_drop_done(q);
}
