/* Work requests as they were read. */
#ifndef RDMAPOST_READ_WR_H
#define RDMAPOST_READ_WR_H

#include "posting/wr_types.h"

struct rp_handle;

/* A work request as it was read, with references to the resources that it uses. */
struct request {
	PyObject *wr;
	const struct wr_type *type;
	PyObject *wr_id;
	PyObject *refs; /* as in struct rp_entry, once the request is read */
	PyObject *sges; /* in a prepared list: an SGE, a tuple of SGEs, or NULL */
	int pinned; /* rp_pin_all() has been called */
	int exact, num_sge; /* exact: not a subclass, so slots can be read */
	size_t at; /* offset of its struct in the post's `structs` */
	size_t owners; /* index of its first SGE's owner in the post's `owners` */
	uint64_t flags;
	uint64_t cookie, tagged; /* as recorded; the second is a tagged receive's */
	PyObject *wr_id_of_tag; /* recv_wr_id of a TAG_ADD */
	PyObject *tag; /* the handle of a TAG_DEL, or the new one of a TAG_ADD */
	struct rp_handle *ah, *mw, *mr;
	PyObject *hdr;
	uint64_t hdr_len;
};

/* Why a work request is refused: a rule, and the values for its message. */
struct refusal {
	const char *rule; /* a name in rdmapost/posting/rules.py, or NULL */
	PyObject *name, *value; /* borrowed: the objects read are held */
	PyObject *owned; /* the value that could not be read */
	uint64_t a, b;
	struct ibv_sge sge;
};

/* A list of work requests being posted. */
struct post {
	PyObject *wrs; /* a tuple, or NULL if the caller's argument is a single work request */
	struct request *requests;
	size_t count, capacity;
	char *structs; /* the device's, each followed by its SGEs */
	size_t used, size;
	PyObject **owners; /* each SGE's owner, borrowed from what the requests hold */
	size_t owned, owner_room;
	PyObject **holds; /* what the request being read will hold */
	size_t holding, hold_room;
	int type_1; /* ibv_bind_mw() posts it */
	int sure; /* if ibv_bind_mw() fails, nothing was posted */
	int binds; /* it binds windows */
	int invalidates; /* a prepared list with LOCAL_INVs */
	struct refusal refusal; /* of the last request */
	/* Enough for typical posts; uninitialised. */
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

/*
 * Borrowed references to what a request holds until it is done. That excludes INLINE data, which is
 * copied before the post returns.
 */
static inline PyObject *rp_held_until_done(const struct work_queue *q, const struct request *r)
{
	if (q->verb != SEND || r->mw || !(r->flags & IBV_SEND_INLINE))
		return r->refs;
	return (PyObject *)r->ah;
}

/* Read work requests up to the first that is refused; 0, or -1 with an exception. */
int rp_read(struct work_queue *q, PyObject *wrs, struct post *post);

/*
 * Unpin what the requests name, unless it is in a record of work in flight. Call this before a
 * post's use of its queue ends: a close that was deferred until then would otherwise be refused.
 */
void rp_unpin_requests(struct post *post);

/* Release all that was read; may run arbitrary Python code. */
void rp_free_post(struct post *post);

/*
 * Read an int in 0..max. Runs no Python code. Returns 0, perhaps with an exception, for anything
 * else.
 */
static inline int rp_read_int(PyObject *value, uint64_t max, uint64_t *number)
{
	if (!PyLong_CheckExact(value) && !PyLong_Check(value))
		return 0;
	/* PyLong_AsUnsignedLongLong(), whose type is just as wide, takes four times as long. */
	*number = PyLong_AsUnsignedLong(value);
	return *number <= max && (*number != (uint64_t)-1 || !PyErr_Occurred());
}

/* Read an integer in 0..max. Returns 1 if OK, 0 if refused, or -1 with an exception. */
int rp_read_number(struct post *post, PyObject *name, PyObject *value, uint64_t max,
		   uint64_t *number);

/*
 * The steps of reading a request, in order:
 * - begin a post;
 * - add a request with an empty record; returns NULL with an exception;
 * - read its sg_list, or add an SGE of a region: SGEs follow the record, so the request must be the
 *   last;
 * - read a field that is not a number;
 * - end the request: from then on it owns references to all objects that it names.
 * The last four return 1, 0 if the request is refused, or -1 with an exception.
 */
void rp_begin_read(struct post *post);
struct request *rp_open_request(struct work_queue *q, struct post *post, PyObject *wr,
				const struct wr_type *type);
int rp_read_sges(struct post *post, struct request *r, PyObject *sg_list);
int rp_append_sge(struct post *post, struct request *r, const struct ibv_sge *sge, PyObject *mr);
int rp_read_object(struct post *post, struct request *r, const struct field *field, PyObject *value);
int rp_close_request(struct work_queue *q, struct post *post, struct request *r);

/* Read a new sg_list for a request of post `of` into `post`; returns what rp_read() does. */
int rp_reread_sges(const struct post *of, const struct request *from, PyObject *sg_list,
		   struct post *post);

/*
 * Read an SGE whose owner is a region and whose numbers fit; 0 for any other object. Runs no Python
 * code.
 */
int rp_read_exact_sge(PyObject *from, struct ibv_sge *sge);

/* A request's SGEs: in the device's struct, and as a Python tuple. */
static inline struct ibv_sge *rp_sges(const struct post *post, const struct request *r)
{
	return (void *)(post->structs + r->at + rp_heads[r->type->verb].size);
}

PyObject *rp_make_sges(const struct post *post, const struct request *r);

/* Write a number in its field's format. */
void rp_put_number(const struct field *field, void *at, uint64_t number);

#endif
