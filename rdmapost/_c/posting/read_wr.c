/*
 * Reading work requests: each of the caller's objects, once, into a struct ibv_send_wr or the like.
 *
 * This is the only part of a post in which the caller's code can run. Changes to an object that has
 * been read have no effect: the values that were read are checked and posted.
 */
#include "posting/read_wr.h"

#include <endian.h>

#include "handles/exceptions.h"
#include "parts.h"
#include "posting/inflight.h"
#include "posting/inline_buffer.h"
#include "posting/sge.h"
#include "posting/tag_handle.h"

static PyObject *sge_names[3];

enum { SEARCHED = 32 };

/*
 * Whether an object's class has __iter__. Runs none of the caller's code; an exception stays set.
 */
static int has_iter(PyObject *object)
{
	return PyType_GetSlot(Py_TYPE(object), Py_tp_iter) != NULL;
}

/* ---- refusing: always 0 -------------------------------------------------- */

static int refuse(struct post *post, const char *rule, PyObject *name, PyObject *value, uint64_t a)
{
	PyObject *before = post->refusal.owned;

	post->refusal = (struct refusal){ .rule = rule, .name = name, .value = value,
					  .owned = Py_XNewRef(value), .a = a };
	Py_XDECREF(before);
	return 0;
}

/* Turn an exception that a value of the wrong type may raise into a refusal; -1 for any other. */
static int refuse_for_exception(struct post *post)
{
	PyObject *error, *text;

	if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError) &&
	    !PyErr_ExceptionMatches(PyExc_AttributeError) &&
	    !PyErr_ExceptionMatches(PyExc_BufferError) &&
	    !PyErr_ExceptionMatches(PyExc_ArithmeticError))
		return -1;
	error = rp_take_exception();
	text = PyObject_Str(error);
	Py_DECREF(error);
	if (!text)
		return -1;
	refuse(post, "unreadable", NULL, text, 0);
	Py_DECREF(text);
	return 0;
}

/* ---- reading a value: 1, 0 if it is refused, or -1 with an exception -- */

int rp_read_number(struct post *post, PyObject *name, PyObject *value, uint64_t max,
		   uint64_t *number)
{
	PyObject *index;
	int read;

	if (rp_read_int(value, max, number))
		return 1;
	PyErr_Clear();
	if (PyLong_Check(value))
		return refuse(post, "out_of_range", name, value, 64 - (uint64_t)__builtin_clzll(max));
	index = PyNumber_Index(value);
	if (!index && PyErr_ExceptionMatches(PyExc_TypeError)) {
		PyErr_Clear();
		return refuse(post, "not_an_integer", name, value, 0);
	}
	if (!index)
		return refuse_for_exception(post);
	read = rp_read_number(post, name, index, max, number);
	Py_DECREF(index);
	return read;
}

/* A slot's value, borrowed; NULL if it must be looked up by name. */
static inline PyObject *peek(const struct request *r, const struct rp_slot *slot)
{
	return r->exact ? *(PyObject **)(void *)((char *)r->wr + slot->offset) : NULL;
}

/* Return a new reference to an attribute, or NULL with an exception. */
static PyObject *get(const struct request *r, const struct rp_slot *slot)
{
	PyObject *value = peek(r, slot);

	return value ? Py_NewRef(value) : PyObject_GetAttr(r->wr, slot->name);
}

static inline int read_attribute(struct post *post, const struct request *r,
				 const struct rp_slot *slot, uint64_t max, uint64_t *number)
{
	PyObject *value = peek(r, slot);
	int read;

	if (value && rp_read_int(value, max, number))
		return 1;
	PyErr_Clear();
	value = get(r, slot);
	read = value ? rp_read_number(post, slot->name, value, max, number) :
		       refuse_for_exception(post);
	Py_XDECREF(value);
	return read;
}

/* ---- room --------------------------------------------------------------- */

/*
 * Make room for `more` elements of `each` bytes behind the first `used` of the array to which `at`
 * points, and free the old array unless it is `small`; 1, or -1 with an exception.
 */
static int enlarge(void *at, const void *small, size_t used, size_t more, size_t *size, size_t each)
{
	size_t room = 4 * *size;
	void *old, *new;

	while (room < used + more)
		room *= 4;
	new = PyMem_Malloc(room * each);
	if (!new) {
		PyErr_NoMemory();
		return -1;
	}
	memcpy(&old, at, sizeof(old));
	memcpy(new, old, used * each);
	memcpy(at, &new, sizeof(new));
	if (old != small)
		PyMem_Free(old);
	*size = room;
	return 1;
}

static inline int room_for(void *at, const void *small, size_t used, size_t more, size_t *size,
			   size_t each)
{
	return *size - used >= more ? 1 : enlarge(at, small, used, more, size, each);
}

/* Make room for more bytes of structs; 1, or -1 with an exception. */
static inline int room_for_bytes(struct post *post, size_t bytes)
{
	return room_for(&post->structs, post->small, post->used, bytes, &post->size, 1);
}

/* Make room for more SGEs; 1, or -1 with an exception. */
static inline int room_for_sges(struct post *post, size_t count)
{
	if (room_for(&post->owners, post->few_owners, post->owned, count, &post->owner_room,
		     sizeof(*post->owners)) < 0)
		return -1;
	return room_for_bytes(post, count * sizeof(struct ibv_sge));
}

/* ---- what a work request holds ------------------------------------------- */

/*
 * Hold an object while the work request is in flight: 1, or -1 with an exception. Only the latest
 * objects are searched for duplicates, so that the time per SGE does not grow with the number of
 * SGEs; holding an object twice does no harm.
 */
static int hold(struct post *post, PyObject *object)
{
	size_t i = post->holding, oldest = i > SEARCHED ? i - SEARCHED : 0;

	while (i > oldest)
		if (post->holds[--i] == object)
			return 1;
	if (room_for(&post->holds, post->few_holds, post->holding, 1, &post->hold_room,
		     sizeof(*post->holds)) < 0)
		return -1;
	post->holds[post->holding++] = Py_NewRef(object);
	return 1;
}

static void drop_holds(struct post *post)
{
	while (post->holding)
		Py_DECREF(post->holds[--post->holding]);
}

/* Whether `refs` is a tuple of the objects that the request being read will hold. */
static int holds_same(const struct post *post, PyObject *refs)
{
	size_t i = PyTuple_CheckExact(refs) ? (size_t)Py_SIZE(refs) : 0;

	if (i != post->holding)
		return 0;
	while (i && rp_item(refs, (Py_ssize_t)i - 1) == post->holds[i - 1])
		i--;
	return !i;
}

/*
 * A request has been read: give it the objects that it holds; 1, or -1 with an exception. Takes over
 * `shared`, a tuple that it may share, or NULL.
 */
static int seal(struct post *post, struct request *r, PyObject *shared)
{
	Py_ssize_t count = (Py_ssize_t)post->holding;

	if (shared && holds_same(post, shared)) {
		drop_holds(post);
		r->refs = shared;
		return 1;
	}
	Py_XDECREF(shared);
	post->holding = 0;
	if (count)
		r->refs = count == 1 ? post->holds[0] :
				       rp_make_tuple((PyObject *)&PyTuple_Type, post->holds, count);
	return count && !r->refs ? -1 : 1;
}

/* ---- SGEs ---------------------------------------------------------------- */

/*
 * Whether an object is an SGE. A subclass's properties may differ, but the tuple's items are read.
 * tuple.__new__() can create SGEs that lack items.
 */
static int is_sge(PyObject *object)
{
	return rp_is_instance(object, rp_known.sge) && Py_SIZE(object) == 4;
}

int rp_read_exact_sge(PyObject *from, struct ibv_sge *sge)
{
	uint64_t lkey, length;

	if (!rp_has_type(from, rp_known.sge) || !is_sge(from) ||
	    !rp_has_type(rp_item(from, 3), rp_known.mr) ||
	    !rp_read_int(rp_item(from, 0), UINT64_MAX, &sge->addr) ||
	    !rp_read_int(rp_item(from, 1), UINT32_MAX, &length) ||
	    !rp_read_int(rp_item(from, 2), UINT32_MAX, &lkey)) {
		PyErr_Clear();
		return 0;
	}
	sge->length = (uint32_t)length;
	sge->lkey = (uint32_t)lkey;
	return 1;
}

/* Read an SGE into a struct, and take a reference to its owner before any other code can run. */
static int read_sge(struct post *post, PyObject *from, struct ibv_sge *sge)
{
	uint64_t number[3];
	PyObject *owner;

	if (!is_sge(from))
		return refuse(post, "not_an_sge", NULL, from, 0);
	if (rp_read_exact_sge(from, sge)) {
		owner = rp_item(from, 3);
		post->owners[post->owned++] = owner;
		return hold(post, owner);
	}
	for (int i = 0; i < 3; i++) {
		uint64_t max = i ? UINT32_MAX : UINT64_MAX;
		PyObject *value = rp_item(from, i);
		int read = rp_read_number(post, sge_names[i], value, max, &number[i]);

		if (read < 1)
			return read;
	}
	owner = rp_item(from, 3);
	if (owner != Py_None && !rp_is_instance(owner, rp_known.mr) && !rp_has_type(owner, rp_known.buffer))
		return refuse(post, "not_an_owner", NULL, owner, 0);
	*sge = (struct ibv_sge){ number[0], (uint32_t)number[1], (uint32_t)number[2] };
	post->owners[post->owned++] = owner;
	return owner == Py_None ? 1 : hold(post, owner);
}

int rp_read_sges(struct post *post, struct request *r, PyObject *sg_list)
{
	int one = rp_is_instance(sg_list, rp_known.sge), read;
	PyObject *sges = one ? Py_NewRef(sg_list) : PySequence_Tuple(sg_list);
	Py_ssize_t count;
	size_t start = post->used;

	if (!sges && PyErr_ExceptionMatches(PyExc_TypeError) && !has_iter(sg_list)) {
		PyErr_Clear();
		return refuse(post, "not_sges", NULL, sg_list, 0);
	}
	if (!sges)
		return refuse_for_exception(post);
	count = one ? 1 : PyTuple_Size(sges);
	r->owners = post->owned;
	if (count > INT32_MAX / (Py_ssize_t)sizeof(struct ibv_sge))
		read = refuse(post, "too_many_sges", NULL, NULL, (uint64_t)count);
	else
		read = room_for_sges(post, (size_t)count);
	post->used += read > 0 ? (size_t)count * sizeof(struct ibv_sge) : 0;
	for (Py_ssize_t i = 0; read > 0 && i < count; i++)
		read = read_sge(post, one ? sges : PyTuple_GetItem(sges, i),
				(struct ibv_sge *)(void *)(post->structs + start) + i);
	r->num_sge = (int)count;
	Py_DECREF(sges);
	return read;
}

int rp_append_sge(struct post *post, struct request *r, const struct ibv_sge *sge, PyObject *mr)
{
	if (room_for_sges(post, 1) < 0 || hold(post, mr) < 0)
		return -1;
	r->owners = post->owned;
	post->owners[post->owned++] = mr;
	post->used += sizeof(*sge);
	r->num_sge = 1;
	*rp_sges(post, r) = *sge;
	return 1;
}

/* ---- fields -------------------------------------------------------------- */

/* Read a field that is None or a resource; a driver will follow the resource's pointer. */
static int read_resource(struct post *post, struct request *r, const struct field *field,
			 PyObject *value)
{
	PyObject *type = field->what == ADDRESS_HANDLE ? rp_known.ah :
			 field->what == WINDOW	       ? rp_known.mw : rp_known.mr;
	struct rp_handle **at = field->what == ADDRESS_HANDLE ? &r->ah :
				field->what == WINDOW	      ? &r->mw : &r->mr;

	if (value == Py_None)
		return 1;
	if (!rp_is_instance(value, type))
		return refuse(post, "not_a_resource", field->slot.name, value,
			      (uint64_t)field->what);
	*at = (struct rp_handle *)value;
	return hold(post, value);
}

static int read_header(struct post *post, struct request *r, const struct field *field,
		       PyObject *value)
{
	struct ibv_send_wr *wr = (void *)(post->structs + r->at);
	/* A bytes object neither changes nor moves. */
	PyObject *buffer = PyBytes_CheckExact(value) ? Py_NewRef(value) : rp_make_buffer(value);
	uint64_t start;
	int status;

	if (!buffer && !PyErr_ExceptionMatches(PyExc_TypeError) &&
	    !PyErr_ExceptionMatches(PyExc_BufferError) && !PyErr_ExceptionMatches(PyExc_ValueError))
		return -1;
	if (!buffer) {
		PyErr_Clear();
		return refuse(post, "not_bytes", field->slot.name, value, 0);
	}
	start = rp_buffer_start(buffer, &r->hdr_len);
	if (r->hdr_len && r->hdr_len <= UINT16_MAX) {
		wr->tso.hdr = (void *)(uintptr_t)start;
		wr->tso.hdr_sz = (uint16_t)r->hdr_len;
	}
	r->hdr = buffer;
	status = r->hdr_len > UINT16_MAX ?
		       refuse(post, "header_too_long", NULL, NULL, r->hdr_len) : hold(post, buffer);
	Py_DECREF(buffer);
	return status;
}

void rp_put_number(const struct field *field, void *at, uint64_t number)
{
	if (field->what == NETWORK)
		*(uint32_t *)at = htobe32((uint32_t)number);
	else if (field->size == 8)
		*(uint64_t *)at = number;
	else if (field->size == 4)
		*(uint32_t *)at = (uint32_t)number;
	else
		*(uint16_t *)at = (uint16_t)number;
}

int rp_read_object(struct post *post, struct request *r, const struct field *field, PyObject *value)
{
	switch (field->what) {
	case HEADER:
		return read_header(post, r, field, value);
	case TAG:
		if (value != Py_None && !rp_has_type(value, rp_known.tag_handle))
			return refuse(post, "not_a_tag_handle", NULL, value, 0);
		r->tag = value == Py_None ? NULL : Py_NewRef(value);
		return 1;
	default:
		return read_resource(post, r, field, value);
	}
}

/* Read a wr_id as an int. */
static inline int read_wr_id(struct post *post, const struct request *r, const struct rp_slot *slot,
			     PyObject **wr_id)
{
	PyObject *value = peek(r, slot);
	uint64_t number = 0;
	int read;

	if (value && PyLong_CheckExact(value) && rp_read_int(value, UINT64_MAX, &number)) {
		*wr_id = Py_NewRef(value);
		return 1;
	}
	PyErr_Clear();
	read = read_attribute(post, r, slot, UINT64_MAX, &number);
	if (read > 0)
		*wr_id = PyLong_FromUnsignedLongLong(number);
	return read > 0 && !*wr_id ? -1 : read;
}

static int read_field(struct post *post, struct request *r, const struct field *field)
{
	uint64_t number = 0;
	PyObject *value;
	int read;

	switch (field->what) {
	case NUMBER:
	case NETWORK:
		read = read_attribute(post, r, &field->slot, field->max, &number);
		if (read > 0)
			rp_put_number(field, post->structs + r->at + field->at, number);
		return read;
	case TAGGED_WR_ID:
		return read_wr_id(post, r, &field->slot, &r->wr_id_of_tag);
	default:
		if (peek(r, &field->slot) == Py_None && field->what != HEADER)
			return 1;
		value = get(r, &field->slot);
		read = value ? rp_read_object(post, r, field, value) : refuse_for_exception(post);
		Py_XDECREF(value);
		return read;
	}
}

/* Write the fields that every struct of a verb has. */
static void put_head(char *at, const struct request *r)
{
	if (r->type->verb == SEND) {
		struct ibv_send_wr *wr = (void *)at;

		wr->opcode = (enum ibv_wr_opcode)r->type->opcode;
		wr->send_flags = (unsigned int)r->flags;
		wr->num_sge = r->num_sge;
	} else if (r->type->verb == SRQ_OPS) {
		struct ibv_ops_wr *wr = (void *)at;

		wr->opcode = (enum ibv_ops_wr_opcode)r->type->opcode;
		wr->flags = (int)r->flags;
		wr->tm.add.num_sge = r->num_sge;
	} else {
		((struct ibv_recv_wr *)(void *)at)->num_sge = r->num_sge;
	}
}

struct request *rp_open_request(struct work_queue *q, struct post *post, PyObject *wr,
				const struct wr_type *type)
{
	size_t size = rp_heads[q->verb].size, half = offsetof(struct request, cookie);
	struct request *r;

	if (room_for(&post->requests, post->few, post->count, 1, &post->capacity, sizeof(*r)) < 0 ||
	    room_for_bytes(post, size) < 0)
		return NULL;
	r = &post->requests[post->count++];
	/*
	 * Clear it in halves: to clear it in one piece, GCC would use "rep stos", which takes
	 * longer than the rest of this function.
	 */
	memset(r, 0, half);
	memset((char *)r + half, 0, sizeof(*r) - half);
	r->wr = wr;
	r->type = type;
	r->at = post->used;
	post->used += size;
	memset(post->structs + r->at, 0, size);
	return r;
}

int rp_close_request(struct work_queue *q, struct post *post, struct request *r)
{
	PyObject *shared = NULL;

	if (r->wr_id_of_tag) {
		/* Not later: what the device has accepted must get its handle. */
		r->tag = rp_make_tag_handle(q->in_flight->tagged);
		if (!r->tag)
			return -1;
	}
	/* Sends to one peer from one region hold the same objects: a new tuple would cost most. */
	if (post->holding > 1)
		shared = post->count > 1 ? Py_XNewRef(r[-1].refs) : rp_latest_refs(q->in_flight);
	if (seal(post, r, shared) < 0)
		return -1;
	put_head(post->structs + r->at, r);
	return 1;
}

/* Read the next work request; 1, 0 if it is refused, or -1 with an exception. */
static int read_next(struct work_queue *q, struct post *post, PyObject *wr,
		     const struct wr_type *type)
{
	struct request *r = rp_open_request(q, post, wr, type);
	PyObject *sg_list;
	int read;

	if (!r)
		return -1;
	if (!type)
		return refuse(post, "not_a_work_request", NULL, wr, 0);
	r->exact = type->has_offsets && rp_has_type(wr, type->class);
	read = read_wr_id(post, r, &type->wr_id, &r->wr_id);
	if (read > 0 && type->flags.name)
		read = read_attribute(post, r, &type->flags,
				      q->verb == SEND ? UINT32_MAX : INT32_MAX, &r->flags);
	for (int i = 0; read > 0 && i < type->fields; i++)
		read = read_field(post, r, &type->field[i]);
	if (read > 0 && type->has_sges) {
		sg_list = get(r, &type->sg_list);
		read = sg_list ? rp_read_sges(post, r, sg_list) : refuse_for_exception(post);
		Py_XDECREF(sg_list);
	}
	return read > 0 ? rp_close_request(q, post, r) : read;
}

/* ---- all of them --------------------------------------------------------- */

void rp_begin_read(struct post *post)
{
	post->wrs = NULL;
	post->count = post->used = post->owned = post->holding = 0;
	post->type_1 = post->sure = post->binds = post->invalidates = 0;
	post->refusal.rule = NULL;
	post->refusal.owned = NULL;
	post->requests = post->few;
	post->capacity = sizeof(post->few) / sizeof(post->few[0]);
	post->owners = post->few_owners;
	post->owner_room = sizeof(post->few_owners) / sizeof(post->few_owners[0]);
	post->holds = post->few_holds;
	post->hold_room = sizeof(post->few_holds) / sizeof(post->few_holds[0]);
	post->structs = post->small;
	post->size = sizeof(post->small);
}

static int read_list(struct work_queue *q, PyObject *wrs, struct post *post)
{
	int is_sges = rp_is_instance(wrs, rp_known.sge) || rp_is_instance(wrs, rp_known.blocks);
	Py_ssize_t count;
	int read = 1;

	post->wrs = is_sges ? NULL : PySequence_Tuple(wrs);
	if (!post->wrs) {
		if (is_sges || (PyErr_ExceptionMatches(PyExc_TypeError) && !has_iter(wrs))) {
			PyErr_Clear();
			Py_XDECREF(PyObject_CallMethod((PyObject *)q, "_not_a_sequence", "(O)", wrs));
		}
		return -1;
	}
	count = PyTuple_Size(post->wrs);
	for (Py_ssize_t i = 0; read > 0 && i < count; i++) {
		PyObject *wr = PyTuple_GetItem(post->wrs, i);

		read = read_next(q, post, wr, rp_wr_type_of(q, Py_TYPE(wr)));
	}
	return read;
}

int rp_read(struct work_queue *q, PyObject *wrs, struct post *post)
{
	const struct wr_type *type = PyList_CheckExact(wrs) ? NULL : rp_wr_type_of(q, Py_TYPE(wrs));

	rp_begin_read(post);
	return (type ? read_next(q, post, wrs, type) : read_list(q, wrs, post)) < 0 ? -1 : 0;
}

int rp_reread_sges(const struct post *of, const struct request *from, PyObject *sg_list,
		   struct post *post)
{
	struct request *r = post->few;
	size_t size = rp_heads[from->type->verb].size;

	rp_begin_read(post);
	*r = (struct request){ .wr = from->wr, .type = from->type, .flags = from->flags,
			       .ah = from->ah, .hdr = from->hdr, .hdr_len = from->hdr_len };
	post->count = 1;
	memcpy(post->structs, of->structs + from->at, size);
	post->used = size;
	if ((r->ah && hold(post, (PyObject *)r->ah) < 0) || (r->hdr && hold(post, r->hdr) < 0) ||
	    rp_read_sges(post, r, sg_list) < 0)
		return -1;
	return seal(post, r, NULL) < 0 ? -1 : 0;
}

PyObject *rp_make_sges(const struct post *post, const struct request *r)
{
	const struct ibv_sge *sge = rp_sges(post, r);
	PyObject *sges = PyList_New(0), *made;

	for (int i = 0; sges && i < r->num_sge; i++)
		if (rp_append_new(sges, rp_make_sge(sge[i].addr, sge[i].length,
						    PyLong_FromUnsignedLong(sge[i].lkey),
						    post->owners[r->owners + (size_t)i])))
			Py_CLEAR(sges);
	made = sges ? PyList_AsTuple(sges) : NULL;
	Py_XDECREF(sges);
	return made;
}

void rp_unpin_requests(struct post *post)
{
	for (size_t i = 0; i < post->count; i++) {
		struct request *r = &post->requests[i];

		if (r->pinned)
			rp_unpin_all(r->refs);
		r->pinned = 0;
	}
}

void rp_free_post(struct post *post)
{
	rp_unpin_requests(post);
	for (size_t i = 0; i < post->count; i++) {
		struct request *r = &post->requests[i];

		Py_XDECREF(r->refs);
		Py_XDECREF(r->wr_id);
		Py_XDECREF(r->wr_id_of_tag);
		Py_XDECREF(r->tag);
	}
	drop_holds(post);
	Py_XDECREF(post->refusal.owned);
	Py_XDECREF(post->wrs);
	if (post->holds != post->few_holds)
		PyMem_Free(post->holds);
	if (post->requests != post->few)
		PyMem_Free(post->requests);
	if (post->owners != post->few_owners)
		PyMem_Free(post->owners);
	if (post->structs != post->small)
		PyMem_Free(post->structs);
}

int rp_add_read_wr(void)
{
	static const char *const names[] = { "an SGE's addr", "an SGE's length",
					     "an SGE's lkey" };

	for (int i = 0; i < 3; i++) {
		sge_names[i] = PyUnicode_InternFromString(names[i]);
		if (!sge_names[i])
			return -1;
	}
	return 0;
}
