/*
 * The path that every post takes.
 *
 * 1. read     the caller's objects once, into numbers and references that we own;
 * 2. check    those, by the rules of rules.c;
 * 3. record   them as in flight, with everything that they name;
 * 4. submit   the device's struct, made from those numbers;
 * 5. take back what was not posted, and have Python say why.
 *
 * The caller's code (__index__, an iterator, a property, a finalizer) can run only
 * in step 1 and after step 5.
 */
#ifndef RDMAPOST_POST_H
#define RDMAPOST_POST_H

#include "posting/inflight.h"

enum { WR_TYPES = 24, FIELDS = 8 };

/* The verbs that post, as rdmapost/posting/fields.py numbers them. */
enum { SEND, RECV, SRQ_RECV, SRQ_OPS };

/* Each verb's struct for a work request: its size, and the offset of its pointer to SGEs. */
extern const struct rp_head {
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
	int has_offsets; /* of all that follow */
	struct rp_slot wr_id, sg_list, flags;
	int fields;
	struct field field[FIELDS];
};

/* A work request as it was read, with references to the resources that it uses. */
struct request {
	PyObject *wr;
	const struct wr_type *type;
	PyObject *wr_id;
	PyObject *refs; /* as in struct rp_entry, once all of it is read */
	int pinned; /* rp_pin_all() has been called */
	int exact, num_sge; /* exact: not a subclass, so slots can be read */
	size_t at; /* of its struct in the post's */
	size_t owners; /* the index of its first SGE's */
	uint64_t flags;
	uint64_t cookie, tagged, serial; /* as recorded; the last two of a tagged receive */
	PyObject *wr_id_of_tag; /* recv_wr_id of a TAG_ADD */
	PyObject *tag; /* the handle of a TAG_DEL */
	struct rp_handle *ah, *mw, *mr;
	PyObject *hdr;
	uint64_t hdr_len;
};

/*
 * The bits of a window's key that a bind chooses. The others are the device's; drivers ignore them
 * in a bind, without an error.
 */
#define RP_KEY_BYTE 0xffu

static inline void rp_put_key(struct ibv_mw *mw, uint32_t rkey)
{
	mw->rkey = (mw->rkey & ~RP_KEY_BYTE) | (rkey & RP_KEY_BYTE);
}

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
	char *structs; /* the device's, each followed by its SGEs */
	size_t used, size;
	PyObject **owners; /* every SGE's, borrowed from what the requests hold */
	size_t owned, owner_room;
	PyObject **holds; /* what the request being read will hold */
	size_t holding, hold_room;
	int type_1, sure; /* ibv_bind_mw() posts it; sure: if that fails, nothing was posted */
	int binds; /* windows */
	int invalidates; /* a prepared list with LOCAL_INVs */
	struct refusal refusal; /* of the last request */
	/* Enough for usual posts; uninitialised. */
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

struct work_queue {
	PyObject_HEAD
	struct rp_lock lock;
	struct rp_in_flight *in_flight; /* NULL before __init__ */
	int verb, checked, datagram;
	int binds; /* the queue pair's type has BIND_MW */
	int builds; /* it has FLUSH or ATOMIC_WRITE (send_ops_flags) */
	int ready; /* the state accepts work requests */
	uint64_t room; /* work requests that may be outstanding */
	uint64_t max_msg_size;
	int max_sge;
	uint64_t max_inline_data, max_tso_header;
	uint64_t max_num_tags;
	struct ibv_pd *pd;
	const struct wr_type *last; /* class posted */
	char takes[WR_TYPES];
	uint32_t flags[WR_TYPES]; /* those allowed */
};

extern struct wr_type rp_wr_types[WR_TYPES];
extern int rp_num_wr_types;

/* What work requests refer to; see sge.c, tag_handle.c and read_wr.c. */
extern struct rp_known {
	PyObject *sge, *mr, *mw, *ah, *buffer, *tag_handle, *blocks, *ranges, *recv_wr;
} rp_known;

/* ---- sge.c, inline_buffer.c: SGEs, and unregistered memory ----------------- */

/* Make an SGE; `owner` is an MR, a buffer or None. Steals `lkey`, which may be NULL. */
PyObject *rp_make_sge(uint64_t addr, uint64_t length, PyObject *lkey, PyObject *owner);

/* Where an MR has the numbers that its SGEs are made of. */
extern struct rp_mr_slots {
	struct rp_slot addr, length;
} rp_mr_slots;

PyObject *rp_make_buffer(PyObject *of);

/* A buffer's address and length; also takes bytes. */
uint64_t rp_buffer_start(PyObject *buffer, uint64_t *length);

/* ---- tag_handle.c: a matching-list entry --------------------------------- */

struct rp_tag_handle {
	PyObject_HEAD
	struct rp_in_flight *list; /* the tagged receives */
	uint64_t cookie, serial;
	uint32_t value; /* the device's name for it */
};

PyObject *rp_make_tag_handle(struct rp_in_flight *list, uint64_t cookie, uint64_t serial,
			     uint32_t value);

/* ---- read_wr.c ---------------------------------------------------------- */

/* Return the work request class that `type` is or derives from, or NULL. */
const struct wr_type *rp_find_wr_type(struct work_queue *q, PyTypeObject *type);

static inline const struct wr_type *rp_wr_type_of(struct work_queue *q, PyTypeObject *type)
{
	const struct wr_type *last = RP_LOAD(&q->last);

	return last && (PyTypeObject *)last->class == type ? last : rp_find_wr_type(q, type);
}

/* Read work requests up to the first that is refused; 0, or -1 with an exception. */
int rp_read(struct work_queue *q, PyObject *wrs, struct post *post);

/* Release all that was read; may run any Python code. */
void rp_free_post(struct post *post);

/* Read an int that fits, running no Python code; whether it was one. An exception may be set. */
static inline int rp_read_int(PyObject *value, uint64_t max, uint64_t *number)
{
	if (!PyLong_CheckExact(value) && !PyLong_Check(value))
		return 0;
	/* As wide as unsigned long long, whose call takes four times as long. */
	*number = PyLong_AsUnsignedLong(value);
	return *number <= max && (*number != (uint64_t)-1 || !PyErr_Occurred());
}

/* Read an integer in 0..max: 1, 0 if it is refused, or -1 with an exception. */
int rp_read_number(struct post *post, PyObject *name, PyObject *value, uint64_t max,
		   uint64_t *number);

/*
 * The steps of reading a request, in order:
 * - begin a post;
 * - add a request with an empty record; returns NULL with an exception;
 * - read its sg_list, or add an SGE of a region: SGEs follow the record, which must be the last;
 * - read a field that is not a number;
 * - end the request: it owns references to all that it names.
 * The last four return 1, 0 if the request is refused, or -1 with an exception.
 */
void rp_begin_read(struct post *post, PyObject *one);
struct request *rp_open_request(struct work_queue *q, struct post *post, PyObject *wr,
				const struct wr_type *type);
int rp_read_sges(struct post *post, struct request *r, PyObject *sg_list);
int rp_append_sge(struct post *post, struct request *r, const struct ibv_sge *sge, PyObject *mr);
int rp_read_object(struct post *post, struct request *r, const struct field *field, PyObject *value);
int rp_close_request(struct work_queue *q, struct post *post, struct request *r);

/* Read a new sg_list for one of a post's work requests into another post; returns as rp_read. */
int rp_reread_sges(const struct post *of, size_t index, PyObject *sg_list, struct post *post);

/* Read an SGE of a region whose numbers fit; whether it is one. Runs no Python code. */
int rp_read_exact_sge(PyObject *from, struct ibv_sge *sge);

/* A request's SGEs: in the device's struct, and as a Python tuple. */
static inline struct ibv_sge *rp_sges(const struct post *post, const struct request *r)
{
	return (void *)(post->structs + r->at + rp_heads[r->type->verb].size);
}

PyObject *rp_make_sges(const struct post *post, const struct request *r);

/* Write a number in its field's format. */
void rp_put_number(const struct field *field, void *at, uint64_t number);

/* ---- post.c ------------------------------------------------------------- */

extern PyObject *rp_queue_type;

/* The queue of a queue pair or SRQ that a verb posts to; NULL with an exception. */
struct work_queue *rp_queue_of(PyObject *owner, int verb);

/* Point a device's struct at its SGEs, the next one and the structs that it names. */
void rp_link(const struct post *post, size_t index, size_t count);

/* Post a prepared list; `*sent` is what it carries, NULL once it is closed. None, or NULL. */
PyObject *rp_post_list(struct work_queue *q, struct rp_handle *owner, struct post *post,
		       struct rp_sent *const *sent);

/* Have Python raise a PostError, or a ValueError if `posted` is -1: always NULL. */
PyObject *rp_raise_refusal(struct work_queue *q, struct rp_handle *owner, PyObject *wrs,
			   const struct refusal *why, size_t index, Py_ssize_t posted);
PyObject *rp_raise_list_closed(struct work_queue *q, const struct post *post);

/* Begin to use the queue's owner, and take the queue's lock; 0, or -1 with an exception. */
struct rp_posting {
	struct rp_thread *me;
	struct rp_use use;
};
static inline int rp_begin_post(struct work_queue *q, struct rp_handle *owner,
				struct rp_posting *posting)
{
	posting->me = rp_thread();
	if (rp_begin_use_by(posting->me, owner, &posting->use)) {
		rp_raise_closed(owner);
		return -1;
	}
	if (rp_try_acquire(&q->lock, posting->me) || !rp_acquire(&q->lock))
		return 0;
	rp_end_use(&posting->use);
	return -1;
}

/*
 * End a post, and let the device carry out what it accepted, if `taken`. Returns a signal handler's
 * exception, or NULL.
 */
static inline PyObject *rp_end_and_run(struct work_queue *q, struct rp_posting *posting, int taken)
{
	PyObject *raised;

	rp_release(&q->lock);
	raised = taken ? rp_run_device() : NULL;
	rp_end_use_by(posting->me, &posting->use);
	return raised;
}

static inline void rp_end_post(struct work_queue *q, struct rp_posting *posting)
{
	rp_end_and_run(q, posting, 0);
}

/* A device's answer to a list: an errno or 0, and how many it accepted, or -1 if unknown. */
struct outcome {
	int code;
	int64_t posted;
};
struct outcome rp_submit(const struct work_queue *q, void *object, void *records, size_t count);
struct outcome rp_submit_chain(int verb, void *object, void *records, size_t count);

/* build_wr.c: the same for sends to a queue pair with send_ops_flags. */
struct outcome rp_build(void *qp, struct ibv_send_wr *wr);

/* How many more work requests the queue accepts; needs its lock. */
uint64_t rp_room(const struct work_queue *q);

/*
 * Return a new reference to `result`, or NULL with an exception: `raised`, with one already set as
 * its context, or only the latter. A note on it says how many of `count` were posted.
 */
PyObject *rp_answer(PyObject *result, PyObject *raised, int64_t posted, size_t count);

/* rp_pin_all(), faster for a region; `in_use` is a handle of this process. */
static inline PyObject *rp_pin_refs(PyObject *refs, const struct rp_handle *in_use)
{
	struct rp_handle *handle = (struct rp_handle *)refs;

	if (!refs || !rp_has_type(refs, rp_known.mr))
		return rp_pin_all(refs);
	rp_pin(handle);
	return handle->process != in_use->process || RP_LOAD(&handle->word) & RP_SHUT ? refs : NULL;
}

/* What a request names until it is done, borrowed: INLINE data is copied before a post returns. */
static inline PyObject *rp_held_until_done(const struct work_queue *q, const struct request *r)
{
	if (q->verb != SEND || r->mw || !(r->flags & IBV_SEND_INLINE))
		return r->refs;
	return (PyObject *)r->ah;
}

/* Whether work requests of a class invalidate a key of this device. */
static inline int rp_invalidates(const struct work_queue *q, const struct wr_type *type)
{
	return q->verb == SEND && type->opcode == IBV_WR_LOCAL_INV;
}

/* ---- columns.c: many work requests from columns of numbers ------------------ */

/* A memory region's address and lkey, as its SGEs have them (sge.c); 0 if it has none. */
int rp_start_of_region(PyObject *mr, struct ibv_sge *sge);

/* ---- rules.c ------------------------------------------------------------ */

/*
 * Pin what a work request refers to, and check it; needs the queue's lock. Whether it may be
 * posted.
 */
int rp_check(const struct work_queue *q, struct rp_handle *owner, struct post *post,
	     struct request *r);

/* The same without naming: what it holds is known to be open. */
int rp_check_again(const struct work_queue *q, struct rp_handle *owner, struct post *post,
		   struct request *r);

/* The first address of an open region or a buffer, and its length. */
uint64_t rp_start_and_length(PyObject *owner, uint64_t *length);

/* The rule that a number for a field of a posted work request breaks by itself, or NULL. */
const char *rp_rule_of_number(const struct work_queue *q, const struct wr_type *type,
			      const struct field *field, uint64_t number);

#endif
