/*
 * Reading work requests: the caller's objects, each once, into records.
 *
 * This is the only part of a post in which code of the caller's can run, and
 * nothing that it changes afterwards counts: what is checked and posted is what
 * was read here.
 */
#include "post.h"

#include <endian.h>

struct kind rp_kinds[KINDS];
int rp_kinds_known;
struct rp_known rp_known;
static PyObject *sge_names[3];

static const size_t heads[] = {
	[SEND] = sizeof(struct ibv_send_wr),
	[RECV] = sizeof(struct ibv_recv_wr),
	[SRQ_RECV] = sizeof(struct ibv_recv_wr),
	[SRQ_OPS] = sizeof(struct ibv_ops_wr),
};

/* A subclass's too. */
static int is_a(PyObject *object, PyObject *type)
{
	return (PyObject *)Py_TYPE(object) == type ||
	       PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)type);
}

/* Whether its class has __iter__; runs no code of the caller's, and keeps an exception that is set. */
static int has_iter(PyObject *object)
{
	return PyType_GetSlot(Py_TYPE(object), Py_tp_iter) != NULL;
}

/* ---- refusing ----------------------------------------------------------- */

static int refuse(struct post *post, const char *rule, PyObject *name,
		  PyObject *value, uint64_t a)
{
	post->refusal.rule = rule;
	post->refusal.name = Py_XNewRef(name);
	post->refusal.value = Py_XNewRef(value);
	post->refusal.a = a;
	return 0;
}

/*
 * Refuse for an exception that a field of the wrong type may raise: 0, or -1 where
 * it is another one, which goes to the caller.
 */
static int refuse_for_exception(struct post *post)
{
	PyObject *type, *value, *trace, *text;

	if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
	    !PyErr_ExceptionMatches(PyExc_ValueError) &&
	    !PyErr_ExceptionMatches(PyExc_AttributeError) &&
	    !PyErr_ExceptionMatches(PyExc_BufferError) &&
	    !PyErr_ExceptionMatches(PyExc_ArithmeticError))
		return -1;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
	/* Newer Pythons have another call, which the limited API of 3.11 has not. */
	PyErr_Fetch(&type, &value, &trace);
	PyErr_NormalizeException(&type, &value, &trace);
#pragma GCC diagnostic pop
	text = value ? PyObject_Str(value) : NULL;
	Py_XDECREF(type);
	Py_XDECREF(value);
	Py_XDECREF(trace);
	if (!text)
		return -1;
	refuse(post, "unreadable", NULL, text, 0);
	Py_DECREF(text);
	return 0;
}

/* ---- reading a value: 1, or 0 where it is refused, or -1 with an exception -- */

/* What is no int, or does not fit, or is not there. */
static int read_unusual(struct post *post, PyObject *name, PyObject *value,
			unsigned int bits, uint64_t most, uint64_t *number)
{
	PyObject *index;

	PyErr_Clear();
	if (PyLong_Check(value))
		return refuse(post, "out_of_range", name, value, bits);
	index = PyNumber_Index(value);
	if (!index && PyErr_ExceptionMatches(PyExc_TypeError)) {
		PyErr_Clear();
		return refuse(post, "not_an_integer", name, value, 0);
	}
	if (!index)
		return refuse_for_exception(post);
	*number = PyLong_AsUnsignedLong(index);
	if ((*number == (uint64_t)-1 && PyErr_Occurred()) || *number > most) {
		PyErr_Clear();
		refuse(post, "out_of_range", name, index, bits);
		Py_DECREF(index);
		return 0;
	}
	Py_DECREF(index);
	return 1;
}

int rp_read_number(struct post *post, PyObject *name, PyObject *value,
		   unsigned int bits, uint64_t *number)
{
	uint64_t most = UINT64_MAX >> (64 - bits);

	if (PyLong_Check(value)) {
		/* Of the same width as unsigned long long, whose call takes four times as long. */
		*number = PyLong_AsUnsignedLong(value);
		if (*number <= most &&
		    (*number != (uint64_t)-1 || !PyErr_Occurred()))
			return 1;
	}
	return read_unusual(post, name, value, bits, most, number);
}

static int exact(const struct request *r)
{
	return (PyObject *)Py_TYPE(r->wr) == r->kind->type;
}

/* Return a new reference to an attribute, or NULL with an exception. */
static PyObject *get(const struct request *r, const struct rp_slot *slot)
{
	PyObject *value = NULL;

	if (RP_READS_SLOTS && slot->offset && exact(r))
		value = Py_XNewRef(*(PyObject **)(void *)((char *)r->wr +
							  slot->offset));
	return value ? value : PyObject_GetAttr(r->wr, slot->name);
}

static int get_number(struct post *post, const struct request *r,
		      const struct rp_slot *slot, unsigned int bits,
		      uint64_t *number)
{
	PyObject *value = get(r, slot);
	int read = value ? rp_read_number(post, slot->name, value, bits, number) :
			   refuse_for_exception(post);

	Py_XDECREF(value);
	return read;
}

/* Hold an object as long as the work request is in flight. */
static int hold(struct request *r, PyObject *object)
{
	Py_ssize_t count;
	PyObject *more;

	if (!r->held) {
		r->held = Py_NewRef(object);
		return 1;
	}
	if (r->held == object)
		return 1;
	count = PyTuple_CheckExact(r->held) ? PyTuple_Size(r->held) : 0;
	for (Py_ssize_t i = 0; i < count; i++)
		if (PyTuple_GetItem(r->held, i) == object)
			return 1;
	more = PyTuple_New(count ? count + 1 : 2);
	if (!more)
		return -1;
	for (Py_ssize_t i = 0; i < count; i++)
		PyTuple_SetItem(more, i,
				Py_NewRef(PyTuple_GetItem(r->held, i)));
	if (!count)
		PyTuple_SetItem(more, 0, Py_NewRef(r->held));
	PyTuple_SetItem(more, count ? count : 1, Py_NewRef(object));
	Py_DECREF(r->held);
	r->held = more;
	return 1;
}

/* ---- making room: 1, or -1 with an exception ----------------------------- */

/* Return an array with room for more; what is in `few` is copied out of it. */
static void *enlarge(void *array, void *few, size_t used, size_t *room,
		     size_t size)
{
	size_t more = 2 * *room + used;
	void *made = array == few ? PyMem_Malloc(more * size) :
				    PyMem_Realloc(array, more * size);

	if (!made) {
		PyErr_NoMemory();
		return NULL;
	}
	if (array == few)
		memcpy(made, array, used * size);
	*room = more;
	return made;
}

static int enlarge_post(struct post *post, size_t bytes, size_t owners)
{
	while (post->size - post->used < bytes) {
		char *records = enlarge(post->records, post->small, post->used,
					&post->size, 1);

		if (!records)
			return -1;
		post->records = records;
	}
	while (post->owner_room - post->owned < owners) {
		PyObject **made = enlarge(post->owners, post->few_owners,
					  post->owned, &post->owner_room,
					  sizeof(*post->owners));

		if (!made)
			return -1;
		post->owners = made;
	}
	return 1;
}

static inline int make_room(struct post *post, size_t bytes, size_t owners)
{
	if (post->size - post->used >= bytes &&
	    post->owner_room - post->owned >= owners)
		return 1;
	return enlarge_post(post, bytes, owners);
}

/* ---- SGEs ---------------------------------------------------------------- */

static int read_sge(struct post *post, struct request *r, PyObject *from,
		    struct ibv_sge *sge)
{
	uint64_t number[3] = { 0 };
	PyObject *owner;

	if ((PyObject *)Py_TYPE(from) != rp_known.sge || PyTuple_Size(from) != 4)
		return refuse(post, "not_an_sge", NULL, from, 0);
	for (int i = 0; i < 3; i++) {
		int read = rp_read_number(post, sge_names[i], PyTuple_GetItem(from, i),
				       i ? 32 : 64, &number[i]);

		if (read < 1)
			return read;
	}
	owner = PyTuple_GetItem(from, 3);
	if (owner != Py_None && !is_a(owner, rp_known.mr) &&
	    (PyObject *)Py_TYPE(owner) != rp_known.buffer)
		return refuse(post, "not_an_owner", NULL, owner, 0);
	sge->addr = number[0];
	sge->length = (uint32_t)number[1];
	sge->lkey = (uint32_t)number[2];
	post->owners[post->owned++] = owner;
	return owner == Py_None ? 1 : hold(r, owner);
}

/* Read an sg_list behind the record, which is the last so far. */
int rp_read_sges(struct post *post, struct request *r, PyObject *sg_list)
{
	int one = (PyObject *)Py_TYPE(sg_list) == rp_known.sge, read = 1;
	PyObject *sges = one ? Py_NewRef(sg_list) : PySequence_Tuple(sg_list);
	Py_ssize_t count;
	size_t start = post->used;

	if (!sges && PyErr_ExceptionMatches(PyExc_TypeError) &&
	    !has_iter(sg_list)) {
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
		read = make_room(post, (size_t)count * sizeof(struct ibv_sge),
				 (size_t)count);
	post->used += read > 0 ? (size_t)count * sizeof(struct ibv_sge) : 0;
	for (Py_ssize_t i = 0; read > 0 && i < count; i++)
		read = read_sge(post, r, one ? sges : PyTuple_GetItem(sges, i),
				(struct ibv_sge *)(void *)(post->records +
							   start) + i);
	r->num_sge = (int)count;
	Py_DECREF(sges);
	return read;
}

/* ---- fields -------------------------------------------------------------- */

/* Read a resource that a driver follows the pointer of, or None. */
static int read_resource(struct post *post, struct request *r,
			 const struct field *field, PyObject *value)
{
	PyObject *type = field->what == ADDRESS_HANDLE ? rp_known.ah :
			 field->what == WINDOW	       ? rp_known.mw :
							 rp_known.mr;
	struct rp_handle *h = (struct rp_handle *)value;

	if (value == Py_None)
		return 1;
	if (!is_a(value, type))
		return refuse(post, "not_a_resource", field->slot.name, value,
			      (uint64_t)field->what);
	if (field->what == ADDRESS_HANDLE)
		r->ah = h;
	else if (field->what == WINDOW)
		r->mw = h;
	else
		r->mr = h;
	return hold(r, value);
}

static int read_header(struct post *post, struct request *r,
		       const struct field *field, PyObject *value)
{
	PyObject *buffer = rp_make_buffer(value);
	int held;

	if (!buffer && !PyErr_ExceptionMatches(PyExc_TypeError) &&
	    !PyErr_ExceptionMatches(PyExc_BufferError) &&
	    !PyErr_ExceptionMatches(PyExc_ValueError))
		return -1;
	if (!buffer) {
		PyErr_Clear();
		return refuse(post, "not_bytes", field->slot.name, value, 0);
	}
	r->hdr_len = rp_buffer_length(buffer);
	if (r->hdr_len > UINT16_MAX) {
		Py_DECREF(buffer);
		return refuse(post, "header_too_long", NULL, NULL, r->hdr_len);
	}
	if (r->hdr_len) {
		struct ibv_send_wr *wr = (void *)(post->records + r->record);

		wr->tso.hdr = (void *)(uintptr_t)rp_buffer_start(buffer);
		wr->tso.hdr_sz = (uint16_t)r->hdr_len;
	}
	r->hdr = buffer;
	held = hold(r, buffer);
	Py_DECREF(buffer);
	return held;
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

static int read_field(struct post *post, struct request *r,
		      const struct field *field, PyObject *value)
{
	unsigned int bits = 8 * (unsigned int)field->size;
	uint64_t number = 0;
	int read;

	switch (field->what) {
	case ADDRESS_HANDLE:
	case WINDOW:
	case REGION:
		return read_resource(post, r, field, value);
	case HEADER:
		return read_header(post, r, field, value);
	case TAG:
		if (value != Py_None &&
		    (PyObject *)Py_TYPE(value) != rp_known.tag_handle)
			return refuse(post, "not_a_tag_handle", NULL, value, 0);
		r->tag = value == Py_None ? NULL : Py_NewRef(value);
		return 1;
	default:
		break;
	}
	read = rp_read_number(post, field->slot.name, value, bits, &number);
	if (read < 1)
		return read;
	if (field->what != TAGGED_WR_ID) {
		rp_put_number(field, post->records + r->record + field->at,
			      number);
		return 1;
	}
	r->wr_id_of_tag = PyLong_FromUnsignedLongLong(number);
	return r->wr_id_of_tag ? 1 : -1;
}

/* Write what the head of every record has. */
static void put_head(const struct queue *q, struct post *post,
		     const struct request *r)
{
	char *at = post->records + r->record;

	if (q->verb == SEND) {
		struct ibv_send_wr *wr = (void *)at;

		wr->opcode = (enum ibv_wr_opcode)r->kind->opcode;
		wr->send_flags = (unsigned int)r->flags;
		wr->num_sge = r->num_sge;
	} else if (q->verb == SRQ_OPS) {
		struct ibv_ops_wr *wr = (void *)at;

		wr->opcode = (enum ibv_ops_wr_opcode)r->kind->opcode;
		wr->flags = (int)r->flags;
		wr->tm.add.num_sge = r->num_sge;
	} else {
		((struct ibv_recv_wr *)(void *)at)->num_sge = r->num_sge;
	}
}

static int read_wr_id(struct post *post, struct request *r)
{
	PyObject *value = get(r, &r->kind->wr_id);
	uint64_t number = 0;
	int read = value ? rp_read_number(post, r->kind->wr_id.name, value, 64,
				       &number) : refuse_for_exception(post);

	if (value && read > 0 && PyLong_CheckExact(value)) {
		r->wr_id = value;
		return 1;
	}
	Py_XDECREF(value);
	if (read < 1)
		return read;
	r->wr_id = PyLong_FromUnsignedLongLong(number);
	return r->wr_id ? 1 : -1;
}

static int read_one(struct queue *q, struct post *post, struct request *r,
		    const struct kind *kind)
{
	size_t head = heads[q->verb];
	PyObject *sg_list;
	int read;

	if (!kind)
		return refuse(post, "not_a_work_request", NULL, r->wr, 0);
	r->kind = kind;
	read = make_room(post, head, 0);
	if (read < 1)
		return read;
	r->record = post->used;
	post->used += head;
	memset(post->records + r->record, 0, head);
	read = read_wr_id(post, r);
	if (read > 0 && q->verb != RECV && q->verb != SRQ_RECV)
		read = get_number(post, r, &kind->flags,
				  q->verb == SEND ? 32 : 31, &r->flags);
	for (int i = 0; read > 0 && i < kind->fields; i++) {
		PyObject *value = get(r, &kind->field[i].slot);

		read = value ? read_field(post, r, &kind->field[i], value) :
			       refuse_for_exception(post);
		Py_XDECREF(value);
	}
	if (read > 0 && kind->has_sges) {
		sg_list = get(r, &kind->sg_list);
		read = sg_list ? rp_read_sges(post, r, sg_list) :
				 refuse_for_exception(post);
		Py_XDECREF(sg_list);
	}
	if (read > 0)
		put_head(q, post, r);
	return read;
}

/* ---- all of them --------------------------------------------------------- */

const struct kind *rp_kind_of(int verb, PyObject *type)
{
	int wanted = verb == SRQ_RECV ? RECV : verb;

	for (int i = 0; i < rp_kinds_known; i++)
		if (type == rp_kinds[i].type && rp_kinds[i].verb == wanted)
			return &rp_kinds[i];
	for (int i = 0; i < rp_kinds_known; i++)
		if (rp_kinds[i].verb == wanted &&
		    PyType_IsSubtype((PyTypeObject *)type,
				     (PyTypeObject *)rp_kinds[i].type))
			return &rp_kinds[i];
	return NULL;
}

static void begin(struct post *post)
{
	memset(post, 0, offsetof(struct post, few));
	post->requests = post->few;
	post->capacity = sizeof(post->few) / sizeof(post->few[0]);
	post->owners = post->few_owners;
	post->owner_room = sizeof(post->few_owners) / sizeof(post->few_owners[0]);
	post->records = post->small;
	post->size = sizeof(post->small);
}

/* Read one more; 1, or 0 where it is refused, or -1 with an exception. */
static int read_next(struct queue *q, struct post *post, PyObject *wr,
		     const struct kind *kind)
{
	struct request *r;

	if (post->count == post->capacity) {
		r = enlarge(post->requests, post->few, post->count,
			    &post->capacity, sizeof(*r));
		if (!r)
			return -1;
		post->requests = r;
	}
	r = &post->requests[post->count];
	memset(r, 0, sizeof(*r));
	r->wr = wr;
	post->count++;
	return read_one(q, post, r, kind);
}

static int read_list(struct queue *q, PyObject *wrs, struct post *post)
{
	Py_ssize_t count;
	int read = 1;

	post->wrs = PySequence_Tuple(wrs);
	if (!post->wrs) {
		if (PyErr_ExceptionMatches(PyExc_TypeError) &&
		    !has_iter(wrs)) {
			PyErr_Clear();
			Py_XDECREF(PyObject_CallMethod((PyObject *)q,
						       "_not_a_sequence", "O",
						       wrs));
		}
		return -1;
	}
	count = PyTuple_Size(post->wrs);
	for (Py_ssize_t i = 0; read > 0 && i < count; i++) {
		PyObject *wr = PyTuple_GetItem(post->wrs, i);

		read = read_next(q, post, wr,
				 rp_kind_of(q->verb, (PyObject *)Py_TYPE(wr)));
	}
	return read;
}

int rp_read(struct queue *q, PyObject *wrs, struct post *post)
{
	const struct kind *kind = rp_kind_of(q->verb, (PyObject *)Py_TYPE(wrs));

	begin(post);
	post->one = wrs;
	return (kind ? read_next(q, post, wrs, kind) :
		       read_list(q, wrs, post)) < 0 ? -1 : 0;
}

PyObject *rp_wrs(const struct post *post)
{
	return post->wrs ? Py_NewRef(post->wrs) : PyTuple_Pack(1, post->one);
}

struct ibv_sge *rp_sges(const struct post *post, const struct request *r)
{
	return (void *)(post->records + r->record + heads[r->kind->verb]);
}

int rp_reread_sges(const struct post *of, size_t index, PyObject *sg_list,
		   struct post *post)
{
	const struct request *from = &of->requests[index];
	size_t head = heads[from->kind->verb];
	struct request *r;
	int read;

	begin(post);
	r = post->requests;
	post->one = from->wr;
	*r = (struct request){ .wr = from->wr, .kind = from->kind,
			       .flags = from->flags, .ah = from->ah,
			       .hdr = from->hdr, .hdr_len = from->hdr_len };
	post->count = 1;
	memcpy(post->records, of->records + from->record, head);
	post->used = head;
	if ((r->ah && hold(r, (PyObject *)r->ah) < 0) ||
	    (r->hdr && hold(r, r->hdr) < 0))
		return -1;
	read = rp_read_sges(post, r, sg_list);
	return read < 0 ? -1 : 0;
}

PyObject *rp_make_sges(const struct post *post, const struct request *r)
{
	const struct ibv_sge *sge = rp_sges(post, r);
	PyObject *sges = PyTuple_New(r->num_sge);

	for (int i = 0; sges && i < r->num_sge; i++) {
		PyObject *one = rp_make_sge(sge[i].addr, sge[i].length,
					    sge[i].lkey,
					    post->owners[r->owners + (size_t)i]);

		if (!one)
			Py_CLEAR(sges);
		else
			PyTuple_SetItem(sges, i, one);
	}
	return sges;
}

void rp_free_post(struct post *post)
{
	for (size_t i = 0; i < post->count; i++) {
		struct request *r = &post->requests[i];

		if (r->named)
			rp_unname_all(r->held);
		Py_XDECREF(r->held);
		Py_XDECREF(r->wr_id);
		Py_XDECREF(r->wr_id_of_tag);
		Py_XDECREF(r->tag);
		Py_XDECREF(r->unbound);
	}
	Py_XDECREF(post->refusal.name);
	Py_XDECREF(post->refusal.value);
	Py_XDECREF(post->outdone);
	Py_XDECREF(post->wrs);
	if (post->requests != post->few)
		PyMem_Free(post->requests);
	if (post->owners != post->few_owners)
		PyMem_Free(post->owners);
	if (post->records != post->small)
		PyMem_Free(post->records);
}

/* Point the records at their SGEs and at each other; the last has no next. */
#define LINK(type, sges)                                                       \
	for (size_t i = 0; i < count; i++) {                                   \
		type *wr = (void *)(post->records + post->requests[i].record); \
		wr->sges = post->requests[i].num_sge ? (void *)(wr + 1) : NULL; \
		wr->next = i + 1 < count ?                                     \
				   (void *)(post->records +                    \
					    post->requests[i + 1].record) :    \
				   NULL;                                       \
	}

void rp_link(const struct queue *q, struct post *post, size_t count)
{
	if (q->verb == SEND) {
		LINK(struct ibv_send_wr, sg_list);
	} else if (q->verb == SRQ_OPS) {
		LINK(struct ibv_ops_wr, tm.add.sg_list);
	} else {
		LINK(struct ibv_recv_wr, sg_list);
	}
}

/* ---- which classes there are --------------------------------------------- */

/* describe_resources(SGE, MR, MW, AH) */
static PyObject *describe_resources(PyObject *self, PyObject *args)
{
	(void)self;
	if (rp_known.sge) {
		PyErr_SetString(PyExc_RuntimeError, "they are known");
		return NULL;
	}
	if (!PyArg_ParseTuple(args, "O!O!O!O!", &PyType_Type, &rp_known.sge,
			      &PyType_Type, &rp_known.mr, &PyType_Type,
			      &rp_known.mw, &PyType_Type, &rp_known.ah))
		return NULL;
	/* Held for ever. */
	Py_INCREF(rp_known.sge);
	Py_INCREF(rp_known.mr);
	Py_INCREF(rp_known.mw);
	Py_INCREF(rp_known.ah);
	Py_RETURN_NONE;
}

static int describe_field(struct kind *kind, PyObject *row)
{
	struct field *field = &kind->field[kind->fields];
	Py_ssize_t at, size;
	const char *name;

	if (!PyArg_ParseTuple(row, "snnC", &name, &at, &size, &field->what) ||
	    rp_find_slot(kind->type, name, &field->slot))
		return -1;
	field->at = (size_t)at;
	field->size = (size_t)size;
	if (at < 0 || size < 0 ||
	    field->at + field->size > heads[kind->verb]) {
		PyErr_SetString(PyExc_ValueError, "a field is not in the struct");
		return -1;
	}
	kind->fields++;
	return 0;
}

/*
 * describe_wr(type, verb, opcode, writes, atomic, fields): a row of
 * rdmapost/fields.py; fields: (name, offset, bytes, what) each.  Returns its index.
 */
static PyObject *describe_wr(PyObject *self, PyObject *args)
{
	struct kind kind = { .fields = 0 };
	PyObject *fields;

	(void)self;
	if (!PyArg_ParseTuple(args, "O!iIppO!", &PyType_Type, &kind.type,
			      &kind.verb, &kind.opcode, &kind.writes,
			      &kind.atomic, &PyTuple_Type, &fields))
		return NULL;
	if (PyTuple_Size(fields) > FIELDS || rp_kinds_known == KINDS ||
	    kind.verb < SEND || kind.verb > SRQ_OPS) {
		PyErr_SetString(PyExc_ValueError, "too many");
		return NULL;
	}
	for (Py_ssize_t i = 0; i < PyTuple_Size(fields); i++)
		if (describe_field(&kind, PyTuple_GetItem(fields, i)))
			return NULL;
	kind.has_sges = PyObject_HasAttrString(kind.type, "sg_list");
	if (rp_find_slot(kind.type, "wr_id", &kind.wr_id) ||
	    (kind.has_sges &&
	     rp_find_slot(kind.type, "sg_list", &kind.sg_list)) ||
	    (kind.verb != RECV &&
	     rp_find_slot(kind.type, kind.verb == SEND ? "send_flags" : "flags",
			  &kind.flags)))
		return NULL;
	Py_INCREF(kind.type); /* held for ever */
	rp_kinds[rp_kinds_known] = kind;
	return PyLong_FromLong(rp_kinds_known++);
}

static PyMethodDef functions[] = {
	{ "describe_resources", describe_resources, METH_VARARGS, NULL },
	{ "describe_wr", describe_wr, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_read(PyObject *module)
{
	static const char *const names[] = { "an SGE's addr", "an SGE's length",
					     "an SGE's lkey" };

	for (int i = 0; i < 3; i++) {
		sge_names[i] = PyUnicode_InternFromString(names[i]);
		if (!sge_names[i])
			return -1;
	}
	return PyModule_AddFunctions(module, functions);
}
