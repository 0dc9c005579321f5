/*
 * Records of posted work requests. Given the cookie that a device returns, they yield the caller's
 * wr_id.
 *
 * A device identifies a completed work request only by its wr_id; an error completion does not even
 * say which queue the work request was on. So the wr_id that the device gets is a cookie: the
 * queue's number and a count. The queue's records give back the caller's wr_id. They also hold the
 * memory, windows and address handles that a work request names, until it is known to be done.
 */
#ifndef RDMAPOST_INFLIGHT_H
#define RDMAPOST_INFLIGHT_H

#include "handles/close.h"
#include "handles/windows.h"

/* An entry's state; a bind whose outcome is unknown stays RP_BIND or RP_UNBIND. */
enum {
	RP_FREE, RP_POSTED, RP_DONE, RP_MATCHED, RP_EARLY, RP_ROWS, RP_LOCAL_INV, RP_INVALIDATED,
	RP_BIND, RP_UNBIND, RP_BOUND, RP_UNBOUND,
};

/*
 * The record of a work request, of a prepared list, or of the rows of a post by columns. On an SRQ,
 * and in a list or rows with LOCAL_INVs, each work request has its own entry.
 */
struct rp_entry {
	PyObject *wr_id; /* an int, bytes (a uint64_t for each row), or a struct rp_sent */
	PyObject *refs; /* one object, a tuple of them (for a bind: window, region), or NULL */
	uint32_t count; /* number of work requests; in a free or retired slot, the next slot */
	/*
	 * Low half of the cookie of the receive that a TAG_DEL removes, or 0; for a LOCAL_INV, the
	 * key; for a bind, the result of rp_number_bind().
	 */
	uint32_t removes;
	/*
	 * In a queue that completes in any order, a number that is never reused. In one that
	 * completes in order: for a TAG_DEL, the serial of the receive that it removes; for a bind,
	 * its place among all binds; for RP_ROWS, the address of the wr_ids.
	 */
	uint64_t serial;
	uint32_t row; /* index in `wr_id` of the entry's first work request; 0 for RP_ROWS */
	unsigned char generation, state, key; /* key: low byte of the key that a bind sets */
};

struct rp_in_flight {
	PyObject_HEAD
	uint64_t posted; /* number of work requests posted so far */
	uint64_t done; /* number of these that are done */
	uint64_t base; /* the queue's part of a cookie */
	uint64_t begun; /* number of work requests done in the entry at `first` */
	struct rp_binder *binder;
	struct rp_in_flight *tagged; /* for SRQ operations: the queue of the SRQ's tagged receives */
	PyObject *queues, *key, *value; /* rp_find_queue()'s dict, and this queue's item; or NULL */
	PyObject *invalidated; /* see rp_note_invalidated(), or NULL */
	struct rp_entry *entries;
	size_t size; /* a power of two, or 0 */
	/*
	 * If the queue completes in order, `entries` is a ring; the entries from `dropped` to
	 * `first` are done but not yet dropped. If the queue completes in any order, `entries` are
	 * slots, of which `end` are taken; `free` and `retired` are the heads of lists of slots:
	 * each is 1 + the index of the first slot, or 0 if the list is empty.
	 */
	size_t dropped, first, end;
	uint32_t free, retired;
	int in_order;
};

RP_SHARED PyObject *rp_in_flight_type;

/*
 * Return a new reference to a cookie's queue, or NULL without an exception.
 * `queues` (Context._queues) maps a queue's number to a value that does not own the queue: a record
 * may hold memory whose owner refers to the queue pair, and the collector would never free such a
 * cycle.
 */
struct rp_in_flight *rp_find_queue(PyObject *queues, uint64_t cookie);

/*
 * Note that a key, of a window or of anything else, has been invalidated. `invalidated` is the
 * device's dict (Context._invalidated), which maps the index in a window's keys to the window's
 * counts.
 */
void rp_note_invalidated(PyObject *invalidated, uint32_t rkey);

/* Make room for `count` more entries; 0, or -1 with an exception. */
int rp_grow(struct rp_in_flight *q, size_t count);

static inline int rp_reserve(struct rp_in_flight *q, size_t count)
{
	/* Completed entries still count as taken until they are dropped. */
	return RP_READS_SLOTS && q->size - (q->end - q->dropped) >= count ? 0 : rp_grow(q, count);
}

/* Take a free slot of a queue that completes in any order, and set its cookie. */
struct rp_entry *rp_take_slot(struct rp_in_flight *q, uint64_t *cookie);

/*
 * Record a work request that is about to be posted; the caller has reserved a free slot. Returns
 * its cookie; the other work requests in a list have the cookies that follow. Takes over the
 * caller's references to the objects that the record holds, and the caller's pins on them.
 */
static inline uint64_t rp_record(struct rp_in_flight *q, struct rp_entry what)
{
	struct rp_entry *entry;
	uint64_t cookie;

	RP_BEGIN(q);
	if (q->in_order) {
		entry = &q->entries[q->end++ & (q->size - 1)];
		cookie = q->base | (q->posted & UINT32_MAX);
	} else {
		entry = rp_take_slot(q, &cookie);
		what.generation = entry->generation;
		what.serial = q->posted;
	}
	*entry = what;
	q->posted += what.count;
	RP_END();
	return cookie;
}

/* Return a new reference to what the latest entry holds if the queue completes in order, or NULL. */
PyObject *rp_latest_refs(struct rp_in_flight *q);

/* The cookie of the index-th of consecutive work requests, of which the first has `first`. */
static inline uint64_t rp_cookie_at(uint64_t first, size_t index)
{
	return (first & ~(uint64_t)UINT32_MAX) | ((first + index) & UINT32_MAX);
}

/*
 * Undo the record of work requests that were not posted: the one with this cookie or, in a prepared
 * list, the last `count`, the first of which has this cookie. If that leaves nothing of the entry,
 * hands over its references in `*taken`. In a queue that completes in order, only the latest entry
 * can be removed; if a signal handler has posted in the meantime, this entry stays until the queue
 * is reset.
 */
void rp_unrecord(struct rp_in_flight *q, uint64_t cookie, uint64_t count, struct rp_entry *taken);

/*
 * Undo the records of a prepared list's or a call's work requests from index `from` to `count`,
 * `each` of which share an entry. Their cookies are in `cookies` or, if that is NULL, consecutive.
 * That frees none of their objects: the caller has references to them too.
 */
void rp_unrecord_rest(struct rp_in_flight *q, uint64_t first, const uint64_t *cookies, size_t each,
		      size_t from, size_t count);

/*
 * Retire a work request that has completed with a status and, if the queue completes in order, all
 * those before it. Returns whether the cookie was outstanding; if so, sets `*wr_id` to a new
 * reference to the caller's wr_id or, if only its value was recorded, sets `*wr_id` to NULL and
 * `*number` to the value. Runs no Python code: rp_drop_done(), which may run any, releases the
 * retired entries.
 */
int rp_complete(struct rp_in_flight *q, uint64_t cookie, int status, PyObject **wr_id,
		uint64_t *number);

void rp_drop_all_done(struct rp_in_flight *q);

static inline void rp_drop_done(struct rp_in_flight *q)
{
	if (!RP_READS_SLOTS || q->dropped != q->first || q->retired || q->tagged)
		rp_drop_all_done(q);
}

/* A message has matched this tagged receive; its data will follow. */
void rp_match(struct rp_in_flight *q, uint64_t cookie);

/*
 * Whether a work request is outstanding in a queue that completes in any order. Once it is done,
 * its slot and eventually its cookie are reused; its serial is not.
 */
int rp_is_outstanding(struct rp_in_flight *q, uint64_t cookie, uint64_t serial);

/*
 * Pin the handles in `refs` (see rp_entry) for a work request in flight, or unpin them.
 * rp_pin_all() returns a borrowed reference to the first handle that is not open, or NULL.
 */
PyObject *rp_pin_all(PyObject *refs);
void rp_unpin_all(PyObject *refs);

/*
 * The bits of a window's key that a bind chooses. The device chooses the others; drivers silently
 * ignore them in a bind.
 */
#define RP_KEY_BYTE 0xffu

static inline void rp_put_key(struct ibv_mw *mw, uint32_t rkey)
{
	mw->rkey = (mw->rkey & ~RP_KEY_BYTE) | (rkey & RP_KEY_BYTE);
}

/* ---- a prepared list in flight ------------------------------------------ */

/* The wr_ids and references that a post of a prepared list carries; immutable while in flight. */
struct rp_sent {
	PyObject_HEAD
	PyObject *wr_ids; /* a tuple */
	PyObject *refs; /* a tuple: what each work request holds, or None */
	/*
	 * The prepared list and the entries of queues. The last one unpins the handles, not the
	 * dealloc: a free-threaded collector keeps garbage alive until it has cleared the regions.
	 */
	uint32_t owners;
};

RP_SHARED PyObject *rp_sent_type;

/*
 * Make a struct rp_sent, which the caller then owns, and pin the handles; NULL with an exception,
 * also if `refs` is NULL. Takes over the references.
 */
PyObject *rp_make_sent(PyObject *wr_ids, PyObject *refs);

/* Add an owner to a struct rp_sent; returns a new reference. */
PyObject *rp_own_sent(PyObject *sent);

/* Drop an owner's reference to a wr_id, which may be a struct rp_sent, or NULL. */
void rp_drop_wr_id(PyObject *wr_id);

#endif
