/*
 * Work request classes and the classes to which they refer, as Python describes them; and queues.
 */
#ifndef RDMAPOST_WR_TYPES_H
#define RDMAPOST_WR_TYPES_H

#include "attribute_offsets.h"
#include "handles/queue_lock.h"

struct rp_in_flight;

enum { WR_TYPES = 24, FIELDS = 8 };

/* The verbs that post, as rdmapost/posting/fields.py numbers them. */
enum { SEND, RECV, SRQ_RECV, SRQ_OPS };

/* Each verb's struct for a work request: its size, and the offset of its pointer to SGEs. */
RP_SHARED const struct rp_head {
	size_t size, sg_list;
} rp_heads[];

/* The types of field in a work request, as given in rdmapost/posting/fields.py. */
enum {
	NUMBER = 'n', /* in host order */
	NETWORK = 'i', /* 32 bits in network order */
	ADDRESS_HANDLE = 'a',
	WINDOW = 'w',
	REGION = 'r',
	HEADER = 'h', /* a pointer to a buffer, followed by its 16-bit length */
	TAG = 't', /* the handle of a matching-list entry */
	TAGGED_WR_ID = 'm', /* of a tagged receive */
};

struct field {
	struct rp_slot slot;
	size_t at, size; /* in the struct */
	uint64_t max;
	int what;
};

/* A class of work requests: a row of rdmapost/posting/fields.py. */
struct wr_type {
	PyObject *class;
	int verb; /* SEND, RECV (also to an SRQ) or SRQ_OPS */
	uint32_t opcode;
	int writes; /* the device writes to its buffers */
	int atomic;
	int has_sges;
	int has_offsets; /* the offsets of all slots below are known */
	struct rp_slot wr_id, sg_list, flags;
	int fields;
	struct field field[FIELDS];
};

/* A send queue, a receive queue, or the queue of an SRQ's operations (post.c). */
struct work_queue {
	PyObject_HEAD
	struct rp_lock lock;
	struct rp_in_flight *in_flight; /* NULL before __init__ */
	int verb, checked, datagram;
	int xrc; /* its work requests name an SRQ of the peer */
	int binds; /* the queue pair's type supports BIND_MW */
	int builds; /* it takes FLUSH or ATOMIC_WRITE (send_ops_flags) */
	int ready; /* the state accepts work requests */
	uint64_t room; /* work requests that may be outstanding */
	uint64_t max_msg_size;
	int max_sge;
	uint64_t max_inline_data, max_tso_header;
	uint64_t max_num_tags;
	struct ibv_pd *pd;
	const struct wr_type *last; /* the class posted last */
	char takes[WR_TYPES];
	uint32_t flags[WR_TYPES]; /* the flags allowed for each class */
};

RP_SHARED struct wr_type rp_wr_types[WR_TYPES];
RP_SHARED int rp_num_wr_types;

/* Classes to which work requests refer; set by Python, inline_buffer.c and tag_handle.c. */
RP_SHARED struct rp_known {
	PyObject *sge, *mr, *mw, *ah, *buffer, *tag_handle, *blocks, *ranges, *recv_wr;
} rp_known;

/* An MR's slots for its address and length, from which its SGEs are created. */
RP_SHARED struct rp_mr_slots {
	struct rp_slot addr, length;
} rp_mr_slots;

/* Return the work request class that `type` is or derives from, or NULL. */
const struct wr_type *rp_find_wr_type(struct work_queue *q, PyTypeObject *type);

static inline const struct wr_type *rp_wr_type_of(struct work_queue *q, PyTypeObject *type)
{
	const struct wr_type *last = RP_LOAD(&q->last);

	return last && (PyTypeObject *)last->class == type ? last : rp_find_wr_type(q, type);
}

/* Whether work requests of a class invalidate a key of this device. */
static inline int rp_invalidates(const struct work_queue *q, const struct wr_type *type)
{
	return q->verb == SEND && type->opcode == IBV_WR_LOCAL_INV;
}

#endif
