/*
 * The path that every post takes.
 *
 * 1. read     the caller's objects once, into numbers and references that we own;
 * 2. check    those, by the rules of rules.c;
 * 3. record   them as in flight, with everything that they name;
 * 4. submit   the device's record, made from those numbers;
 * 5. take back what was not posted, and have Python say why.
 *
 * The caller's code (__index__, an iterator, a property, a finalizer) can run only
 * in step 1 and after step 5.
 */
#ifndef RDMAPOST_POST_H
#define RDMAPOST_POST_H

#include "posting/inflight.h"

enum { KINDS = 24, FIELDS = 8 };

/* The verbs that post, as rdmapost/posting/fields.py numbers them. */
enum { SEND, RECV, SRQ_RECV, SRQ_OPS };

/* Each verb's record: its size, and the offset of its pointer to SGEs. */
extern const struct rp_head {
	size_t size, sg_list;
} rp_heads[];

/* The kinds of field in a work request, as given in rdmapost/posting/fields.py. */
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
	uint64_t most;
	int what;
};

/* A class of work requests: a row of rdmapost/posting/fields.py. */
struct kind {
	PyObject *type;
	int verb; /* SEND, RECV (also to an SRQ) or SRQ_OPS */
	uint32_t opcode;
	int writes; /* the device writes to its buffers */
	int atomic;
	int has_sges;
	int has_offsets; /* of all that follow */
	struct rp_slot wr_id, sg_list, flags;
	int fields;
	struct field field[FIELDS];
};

/* A work request as it was read; what it refers to is held. */
struct request {
	PyObject *wr;
	const struct kind *kind;
	PyObject *wr_id;
	PyObject *held; /* as in struct rp_entry, once all of it is read */
	int named; /* rp_name_all() has been called */
	int exact, num_sge; /* exact: not a subclass, so slots can be read */
	size_t record; /* the offset of its record */
	size_t owners; /* the index of its first SGE's */
	uint64_t flags;
	uint64_t ticket, tagged, serial; /* as recorded; the last two of a tagged receive */
	PyObject *wr_id_of_tag; /* recv_wr_id of a TAG_ADD */
	PyObject *tag; /* the handle of a TAG_DEL */
	struct rp_handle *ah, *mw, *mr;
	PyObject *hdr;
	uint64_t hdr_len;
};

/* Why a work request is refused: a rule, and what its text needs. */
struct refusal {
	const char *rule; /* a name in rdmapost/posting/rules.py, or NULL */
	PyObject *name, *value; /* borrowed: what was read is held */
	PyObject *owned; /* what could not be read */
	uint64_t a, b;
	struct ibv_sge sge;
};

/* A list of work requests being posted. */
struct post {
	PyObject *wrs; /* a tuple, or NULL for the single `one` */
	PyObject *one; /* the caller's argument */
	struct request *requests;
	size_t count, capacity;
	char *records;
	size_t used, size;
	PyObject **owners; /* every SGE's, borrowed from what the requests hold */
	size_t owned, owner_room;
	PyObject **holds; /* what the request being read will hold */
	size_t holding, hold_room;
	int type_1, sure; /* posted by ibv_bind_mw(); sure: not posted if that fails */
	int binds; /* windows */
	struct refusal refusal; /* of the last request */
	/* Enough for most; uninitialised. */
	struct request few[2];
	PyObject *few_owners[8], *few_holds[8];
	_Alignas(8) char small[512];
};

/* Refuse by a rule: always 0. */
static inline int rp_refuse(struct post *post, const char *rule, uint64_t a)
{
	post->refusal = (struct refusal){ .rule = rule, .a = a, .owned = post->refusal.owned };
	return 0;
}

struct queue {
	PyObject_HEAD
	struct rp_lock lock;
	struct rp_in_flight *in_flight; /* NULL before __init__ */
	int verb, checked, datagram;
	int binds; /* the queue pair's type has BIND_MW */
	int ready; /* the state accepts work requests */
	uint64_t room; /* work requests that may be outstanding */
	uint64_t max_msg_size;
	int max_sge;
	uint64_t max_inline_data, max_tso_header;
	uint64_t max_num_tags;
	struct ibv_pd *pd;
	const struct kind *last; /* class posted */
	PyObject *owner_type; /* the owner's */
	char takes[KINDS];
	uint32_t flags[KINDS]; /* those allowed */
};

extern struct kind rp_kinds[KINDS];
extern int rp_kinds_known;

/* What work requests refer to; see region.c, tag.c and read.c. */
extern struct rp_known {
	PyObject *sge, *mr, *mw, *ah, *buffer, *tag_handle;
} rp_known;

/* ---- region.c, buffer.c: SGEs, and unregistered memory -------------------- */

/* Make an SGE; `owner` is an MR, a buffer or None. */
PyObject *rp_make_sge(uint64_t addr, uint64_t length, uint32_t lkey, PyObject *owner);

PyObject *rp_make_buffer(PyObject *of);

/* A buffer's address and length; also takes bytes. */
uint64_t rp_buffer_start(PyObject *buffer, uint64_t *length);

/* ---- tag.c: a matching-list entry ---------------------------------------- */

struct rp_tag_handle {
	PyObject_HEAD
	struct rp_in_flight *list; /* the tagged receives */
	uint64_t ticket, serial;
	uint32_t value; /* the device's name for it */
};

PyObject *rp_make_tag_handle(struct rp_in_flight *list, uint64_t ticket, uint64_t serial,
			     uint32_t value);

/* ---- read.c ------------------------------------------------------------- */

/* Return the work request class that `type` is or derives from, or NULL. */
const struct kind *rp_find_kind(struct queue *q, PyTypeObject *type);

static inline const struct kind *rp_kind_of(struct queue *q, PyTypeObject *type)
{
	const struct kind *last = RP_LOAD(&q->last);

	return last && (PyTypeObject *)last->type == type ? last : rp_find_kind(q, type);
}

/* Read work requests up to the first that is refused; 0, or -1 with an exception. */
int rp_read(struct queue *q, PyObject *wrs, struct post *post);

/* Release all that was read; may run any Python code. */
void rp_free_post(struct post *post);

/* Read an int that fits, running no Python code; whether it was one. An exception may be set. */
static inline int rp_read_int(PyObject *value, uint64_t most, uint64_t *number)
{
	if (!PyLong_CheckExact(value) && !PyLong_Check(value))
		return 0;
	/* As wide as unsigned long long, whose call takes four times as long. */
	*number = PyLong_AsUnsignedLong(value);
	return *number <= most && (*number != (uint64_t)-1 || !PyErr_Occurred());
}

/* Read an integer in 0..most: 1, 0 if it is refused, or -1 with an exception. */
int rp_read_number(struct post *post, PyObject *name, PyObject *value, uint64_t most,
		   uint64_t *number);

/* Read a new sg_list for one of a post's work requests into another post; returns as rp_read. */
int rp_reread_sges(const struct post *of, size_t index, PyObject *sg_list, struct post *post);

/* A request's SGEs: in the record, and as a Python tuple. */
static inline struct ibv_sge *rp_sges(const struct post *post, const struct request *r)
{
	return (void *)(post->records + r->record + rp_heads[r->kind->verb].size);
}

PyObject *rp_make_sges(const struct post *post, const struct request *r);

/* Write a number in its field's format. */
void rp_put_number(const struct field *field, void *at, uint64_t number);

/* ---- post.c ------------------------------------------------------------- */

extern PyObject *rp_queue_type;

/* Point a record at its SGEs, the next record and the structs that it names. */
void rp_link(const struct post *post, size_t index, size_t count);

/* Steps 2 to 5 for a prepared list: what it carries is at `sent`. None, or NULL. */
PyObject *rp_post_list(struct queue *q, struct rp_handle *owner, struct post *post,
		       struct rp_sent *const *sent);

/* Have Python raise a PostError, or a ValueError if `posted` is -1: always NULL. */
PyObject *rp_raise_refusal(struct queue *q, struct rp_handle *owner, PyObject *wrs,
			   const struct refusal *why, size_t index, Py_ssize_t posted);
PyObject *rp_raise_list_closed(struct queue *q, const struct post *post);

/* Begin to use the queue's owner, and take the queue's lock; 0, or -1 with an exception. */
struct rp_turn {
	struct rp_thread *me;
	struct rp_use use;
};
int rp_begin_post(struct queue *q, struct rp_handle *owner, struct rp_turn *turn);
void rp_end_post(struct queue *q, struct rp_turn *turn);

/* rp_name_all(), faster for a region; `in_use` is a handle of this process. */
static inline PyObject *rp_name_held(PyObject *held, const struct rp_handle *in_use)
{
	struct rp_handle *handle = (struct rp_handle *)held;

	if (!held || !rp_has_type(held, rp_known.mr))
		return rp_name_all(held);
	rp_name(handle);
	return handle->process != in_use->process || RP_LOAD(&handle->word) & RP_SHUT ? held : NULL;
}

/* What a request names until it is done, borrowed: INLINE data is copied before a post returns. */
static inline PyObject *rp_held_until_done(const struct queue *q, const struct request *r)
{
	if (q->verb != SEND || r->mw || !(r->flags & IBV_SEND_INLINE))
		return r->held;
	return (PyObject *)r->ah;
}

/* ---- rules.c ------------------------------------------------------------ */

/*
 * Name what a work request holds, and check it; needs the queue's lock. Whether it may be
 * posted.
 */
int rp_check(const struct queue *q, struct rp_handle *owner, struct post *post, struct request *r);

/* The rule that a number for a field of a posted work request breaks by itself, or NULL. */
const char *rp_rule_of_number(const struct queue *q, const struct kind *kind,
			      const struct field *field, uint64_t number);

#endif
