/*
 * Prepared lists: read and checked once, posted again and again.
 *
 * A post of one gives its work requests their tickets, records them as in flight
 * with one entry, and calls the verb.  What the list holds stays held as long as it
 * is open, and as long as a post of it is outstanding.
 */
#include "post.h"

#include <endian.h>
#include <structmember.h>

struct prepared {
	PyObject_HEAD
	struct queue *queue;
	struct rp_handle *owner;
	struct rp_sent *sent; /* NULL once it is closed */
	PyObject **sg_lists; /* a tuple of SGEs each, or NULL */
	struct post post;
};

static PyObject *prepared_type;

/* Put a reference in place, and return the one that was there. */
static PyObject *swap(PyObject **at, PyObject *object)
{
	PyObject *old = *at;

	*at = object;
	return old;
}

/* Whether it is; else with an exception. */
static int is_open(struct prepared *p)
{
	if (!p->sent)
		Py_XDECREF(PyObject_CallMethod((PyObject *)p->queue,
					       "_list_closed", "n",
					       (Py_ssize_t)p->post.count));
	return p->sent != NULL;
}

/* ---- preparing ----------------------------------------------------------- */

static int check_all(struct prepared *p)
{
	struct post *post = &p->post;
	size_t readable = post->count - (post->refusal.rule != NULL);

	for (size_t i = 0; i < readable; i++) {
		struct request *r = &post->requests[i];

		rp_name_all(r->held);
		r->named = 1;
		if (r->kind->opcode == IBV_WR_BIND_MW && p->queue->verb == SEND) {
			post->refusal.rule = "bind_prepared";
			return (int)i;
		}
		if (!rp_check(p->queue, p->owner, post, r, 0))
			return (int)i;
	}
	return post->refusal.rule ? (int)readable : -1;
}

/* Make what posts take along; 0, or -1 with an exception. */
static int make_sent(struct prepared *p)
{
	Py_ssize_t count = (Py_ssize_t)p->post.count;
	PyObject *wr_ids = PyTuple_New(count), *held = PyTuple_New(count);

	for (Py_ssize_t i = 0; wr_ids && held && i < count; i++) {
		struct request *r = &p->post.requests[i];
		int kept = r->held && !(p->queue->verb == SEND &&
					r->flags & IBV_SEND_INLINE);

		PyTuple_SetItem(wr_ids, i, Py_NewRef(r->wr_id));
		PyTuple_SetItem(held, i, Py_NewRef(kept ? r->held : Py_None));
	}
	if (wr_ids && held)
		p->sent = (struct rp_sent *)rp_make_sent(wr_ids, held);
	if (p->sent)
		return 0;
	Py_XDECREF(wr_ids);
	Py_XDECREF(held);
	return -1;
}

static int keep_sg_lists(struct prepared *p)
{
	p->sg_lists = PyMem_Calloc(p->post.count, sizeof(PyObject *));
	if (!p->sg_lists) {
		PyErr_NoMemory();
		return -1;
	}
	for (size_t i = 0; i < p->post.count; i++) {
		p->sg_lists[i] = rp_make_sges(&p->post, &p->post.requests[i]);
		if (!p->sg_lists[i])
			return -1;
	}
	return 0;
}

/* Prepared(queue, owner, wrs) */
static int prepared_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct prepared *p = (struct prepared *)self;
	PyObject *queue, *owner, *wrs;
	struct rp_turn turn;
	int refused = -1, failed;

	(void)kwargs;
	if (p->queue) {
		PyErr_SetString(PyExc_TypeError, "it has been initialised");
		return -1;
	}
	if (!PyArg_ParseTuple(args, "O!O!O", rp_queue_type, &queue,
			      rp_handle_type, &owner, &wrs))
		return -1;
	p->queue = (struct queue *)Py_NewRef(queue);
	p->owner = (struct rp_handle *)Py_NewRef(owner);
	/* The list lives longer than this call: it has a reference of its own. */
	if (rp_kind_of(p->queue->verb, (PyObject *)Py_TYPE(wrs)))
		wrs = PyTuple_Pack(1, wrs);
	else
		Py_INCREF(wrs);
	if (!wrs)
		return -1;
	failed = rp_read(p->queue, wrs, &p->post);
	Py_DECREF(wrs);
	if (failed ||
	    rp_begin_post(p->queue, p->owner, &turn))
		return -1;
	refused = check_all(p);
	rp_end_post(p->queue, &turn);
	if (refused >= 0) {
		rp_raise_refusal(queue, p->owner, &p->post, (size_t)refused, 0);
		return -1;
	}
	if (!p->post.count) {
		PyErr_SetString(PyExc_ValueError,
				"a prepared list has at least one work request");
		return -1;
	}
	for (size_t i = 0; i < p->post.count; i++)
		rp_put_pointers(&p->post, &p->post.requests[i]);
	rp_link(p->queue, &p->post, p->post.count);
	return make_sent(p) || keep_sg_lists(p) ? -1 : 0;
}

static int prepared_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct prepared *p = (struct prepared *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT((PyObject *)p->queue);
	Py_VISIT((PyObject *)p->owner);
	Py_VISIT((PyObject *)p->sent);
	Py_VISIT(p->post.wrs);
	for (size_t i = 0; i < p->post.count; i++) {
		Py_VISIT(p->post.requests[i].held);
		if (p->sg_lists)
			Py_VISIT(p->sg_lists[i]);
	}
	return 0;
}

/* Let go of what the list holds; what is outstanding stays held. */
static void let_go(struct prepared *p)
{
	struct rp_sent *sent = p->sent;
	PyObject *wrs = swap(&p->post.wrs, NULL);

	p->sent = NULL;
	for (size_t i = 0; i < p->post.count; i++) {
		struct request *r = &p->post.requests[i];
		PyObject *held = r->held;

		r->held = NULL;
		if (r->named)
			rp_unname_all(held);
		r->named = 0;
		Py_XDECREF(held);
		if (p->sg_lists)
			Py_CLEAR(p->sg_lists[i]);
	}
	Py_XDECREF((PyObject *)sent);
	Py_XDECREF(wrs);
}

static int prepared_clear(PyObject *self)
{
	let_go((struct prepared *)self);
	return 0;
}

/*
 * Let go before the collector takes any object of the same garbage apart: a
 * region is closed by the last that names it, and must be whole then.
 */
static void prepared_finalize(PyObject *self)
{
	let_go((struct prepared *)self);
}

static void prepared_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	struct prepared *p = (struct prepared *)self;
	freefunc free = (freefunc)PyType_GetSlot(type, Py_tp_free);

	PyObject_GC_UnTrack(self);
	let_go(p);
	PyMem_Free(p->sg_lists);
	if (p->queue)
		rp_free_post(&p->post);
	Py_XDECREF((PyObject *)p->queue);
	Py_XDECREF((PyObject *)p->owner);
	free(self);
	Py_DECREF(type);
}

/* ---- posting ------------------------------------------------------------- */

/* Post with the lock held; the rule that refuses it, or NULL. */
static const char *post_locked(struct prepared *p, struct rp_outcome *outcome)
{
	struct rp_in_flight *q = p->queue->in_flight;
	size_t count = p->post.count;
	struct rp_entry taken;
	uint64_t ticket;

	if (!p->queue->ready)
		return "not_ready";
	if (q->posted - q->done + count > p->queue->room)
		return "full";
	ticket = rp_record(q, Py_NewRef((PyObject *)p->sent), NULL, count, 0);
	for (size_t i = 0; i < count; i++) {
		*(uint64_t *)(void *)(p->post.records +
				      p->post.requests[i].record) =
			(ticket & ~(uint64_t)UINT32_MAX) |
			((ticket + i) & UINT32_MAX);
	}
	*outcome = rp_submit(p->queue, p->owner->address, p->post.records, count);
	if (outcome->posted >= 0 && (uint64_t)outcome->posted < count) {
		rp_unrecord(q, ticket + (uint64_t)outcome->posted,
			    count - (uint64_t)outcome->posted, &taken);
		/* The list has it too. */
		Py_XDECREF(taken.wr_id);
	}
	return NULL;
}

static PyObject *prepared_post(PyObject *self, PyObject *unused)
{
	struct prepared *p = (struct prepared *)self;
	struct rp_outcome outcome = { 0, 0 };
	const char *rule;
	struct rp_turn turn;
	struct post said; /* the list may be closed before it is said */
	uint64_t left;

	(void)unused;
	if (!p->queue || rp_begin_post(p->queue, p->owner, &turn))
		return NULL;
	memset(&said, 0, offsetof(struct post, few));
	said.wrs = p->sent ? Py_NewRef(p->post.wrs) : NULL;
	rule = !p->sent || rp_reserve(p->queue->in_flight, 1) ?
		       "" : post_locked(p, &outcome);
	left = p->queue->room - (p->queue->in_flight->posted -
				 p->queue->in_flight->done);
	rp_end_post(p->queue, &turn);
	if (!said.wrs) {
		Py_XDECREF(PyObject_CallMethod((PyObject *)p->queue,
					       "_list_closed", "n",
					       (Py_ssize_t)p->post.count));
	} else if (rule && *rule) {
		said.refusal.rule = rule;
		rp_raise_refusal((PyObject *)p->queue, p->owner, &said,
				 strcmp(rule, "full") ? 0 :
				 left < p->post.count ? left : 0, 0);
	} else if (outcome.code) {
		rp_raise_failure(p->queue, p->owner, &said, outcome);
	}
	Py_XDECREF(said.wrs);
	if (PyErr_Occurred())
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *prepared_close(PyObject *self, PyObject *unused)
{
	struct prepared *p = (struct prepared *)self;

	(void)unused;
	let_go(p);
	Py_RETURN_NONE;
}

static PyObject *prepared_closed(PyObject *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(!((struct prepared *)self)->sent);
}

static Py_ssize_t prepared_length(PyObject *self)
{
	return (Py_ssize_t)((struct prepared *)self)->post.count;
}

/* The opcode's class of a work request of the list. */
static PyObject *prepared_type_of(PyObject *self, PyObject *arg)
{
	struct prepared *p = (struct prepared *)self;
	size_t index = PyLong_AsSize_t(arg);

	if (index == (size_t)-1 && PyErr_Occurred())
		return NULL;
	if (index >= p->post.count) {
		PyErr_SetString(PyExc_IndexError, "no such work request");
		return NULL;
	}
	return Py_NewRef(p->post.requests[index].kind->type);
}

/* _names(resource): whether the list, open, names it. */
static PyObject *prepared_names(PyObject *self, PyObject *resource)
{
	struct prepared *p = (struct prepared *)self;

	for (size_t i = 0; p->sent && i < p->post.count; i++) {
		PyObject *held = p->post.requests[i].held;

		if (held == resource ||
		    (held && PyTuple_CheckExact(held) &&
		     PySequence_Contains(held, resource) > 0))
			Py_RETURN_TRUE;
	}
	Py_RETURN_FALSE;
}

static PyMethodDef prepared_methods[] = {
	{ "post", prepared_post, METH_NOARGS,
	  "Post the whole list.\n\nRaises:\n"
	  "    PostError: a work request was refused, here or by the device.\n"
	  "    ClosedError: the list or its queue pair is closed." },
	{ "close", prepared_close, METH_NOARGS,
	  "Let go of what the list names; what is outstanding stays so." },
	{ "_type_of", prepared_type_of, METH_O, NULL },
	{ "_names", prepared_names, METH_O, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef prepared_getset[] = {
	{ "closed", prepared_closed, NULL, "Whether it has been closed.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot prepared_slots[] = {
	{ Py_tp_init, prepared_init },
	{ Py_tp_dealloc, prepared_dealloc },
	{ Py_tp_traverse, prepared_traverse },
	{ Py_tp_clear, prepared_clear },
	{ Py_tp_finalize, prepared_finalize },
	{ Py_tp_methods, prepared_methods },
	{ Py_tp_getset, prepared_getset },
	{ Py_sq_length, prepared_length },
	{ 0, NULL },
};

static PyType_Spec prepared_spec = {
	.name = "rdmapost._verbs.Prepared",
	.basicsize = sizeof(struct prepared),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = prepared_slots,
};

/* ---- one work request of a list ------------------------------------------ */

struct item {
	PyObject_HEAD
	struct prepared *list;
	size_t index;
};

static PyObject *item_type;

static int item_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct item *item = (struct item *)self;
	PyObject *list;
	Py_ssize_t index;

	(void)kwargs;
	if (item->list) {
		PyErr_SetString(PyExc_TypeError, "it has been initialised");
		return -1;
	}
	if (!PyArg_ParseTuple(args, "O!n", prepared_type, &list, &index))
		return -1;
	if (index < 0 ||
	    (size_t)index >= ((struct prepared *)list)->post.count) {
		PyErr_SetString(PyExc_IndexError, "no such work request");
		return -1;
	}
	item->list = (struct prepared *)Py_NewRef(list);
	item->index = (size_t)index;
	return 0;
}

static int item_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT((PyObject *)((struct item *)self)->list);
	return 0;
}

static void item_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	freefunc free = (freefunc)PyType_GetSlot(type, Py_tp_free);

	PyObject_GC_UnTrack(self);
	Py_XDECREF((PyObject *)((struct item *)self)->list);
	free(self);
	Py_DECREF(type);
}

/* Raise a ValueError for what was refused of a work request: always -1. */
static int refuse_value(struct prepared *p, struct post *post, size_t index)
{
	PyObject *wr;

	/* Reading the value may have closed the list. */
	if (!is_open(p))
		return -1;
	wr = Py_NewRef(p->post.requests[index].wr);
	post->one = wr;
	rp_raise_refusal((PyObject *)p->queue, p->owner, post, 0, -1);
	post->one = NULL;
	Py_DECREF(wr);
	return -1;
}

/*
 * Make another version of what posts take along, which is then put in place by
 * swap_sent(); NULL with an exception.
 */
static struct rp_sent *change_sent(struct prepared *p, size_t index,
				   PyObject *wr_id, PyObject *held)
{
	Py_ssize_t count = (Py_ssize_t)p->post.count;
	PyObject *wr_ids = PyTuple_New(count), *all = PyTuple_New(count);
	struct rp_sent *sent = NULL, *old = p->sent;

	/* Making the tuples may have run a finalizer that closed the list. */
	for (Py_ssize_t i = 0; old && wr_ids && all && i < count; i++) {
		PyObject *id = PyTuple_GetItem(old->wr_ids, i);
		PyObject *had = PyTuple_GetItem(old->held, i);
		int changed = (size_t)i == index;

		PyTuple_SetItem(wr_ids, i,
				Py_NewRef(changed && wr_id ? wr_id : id));
		PyTuple_SetItem(all, i,
				Py_NewRef(changed && held ? held : had));
	}
	if (old && wr_ids && all)
		sent = (struct rp_sent *)rp_make_sent(wr_ids, all);
	if (!sent) {
		Py_XDECREF(wr_ids);
		Py_XDECREF(all);
	}
	if (!sent && !PyErr_Occurred())
		is_open(p);
	return sent;
}

/* Return what is to be released; NULL, and nothing is swapped, where the list is closed. */
static struct rp_sent *swap_sent(struct prepared *p, struct rp_sent *sent)
{
	struct rp_sent *old = p->sent;

	if (old)
		p->sent = sent;
	return old;
}

static PyObject *item_wr_id(PyObject *self, void *unused)
{
	struct item *item = (struct item *)self;

	(void)unused;
	if (!item->list)
		return Py_NewRef(Py_None);
	return Py_NewRef(item->list->post.requests[item->index].wr_id);
}

static int item_set_wr_id(PyObject *self, PyObject *value, void *unused)
{
	struct item *item = (struct item *)self;
	struct post post;
	uint64_t number;
	PyObject *name, *wr_id;
	struct rp_sent *sent, *old;
	struct request *r;
	int read, failed;

	(void)unused;
	if (!item->list || !value || !is_open(item->list))
		return -1;
	memset(&post, 0, offsetof(struct post, few));
	name = item->list->post.requests[item->index].kind->wr_id.name;
	read = rp_read_number(&post, name, value, 64, &number);
	failed = read < 0 ? -1 : read ? 0 :
		 refuse_value(item->list, &post, item->index);
	Py_XDECREF(post.refusal.name);
	Py_XDECREF(post.refusal.value);
	if (failed)
		return -1;
	wr_id = PyLong_FromUnsignedLongLong(number);
	sent = wr_id ? change_sent(item->list, item->index, wr_id, NULL) : NULL;
	old = sent ? swap_sent(item->list, sent) : NULL;
	if (old) {
		r = &item->list->post.requests[item->index];
		wr_id = swap(&r->wr_id, wr_id);
	}
	Py_XDECREF(wr_id);
	Py_XDECREF((PyObject *)(old ? old : sent));
	return old ? 0 : -1;
}

static PyObject *item_sg_list(PyObject *self, void *unused)
{
	struct item *item = (struct item *)self;
	PyObject *sges = item->list && item->list->sg_lists ?
				 item->list->sg_lists[item->index] : NULL;

	(void)unused;
	return sges ? Py_NewRef(sges) : PyTuple_New(0);
}

/* Let another SGE list take the place of one with as many SGEs. */
static int put_sges(struct prepared *p, size_t index, struct post *post)
{
	struct request *r = &p->post.requests[index], *new = post->requests;
	size_t count = (size_t)r->num_sge;
	int kept = !(p->queue->verb == SEND && r->flags & IBV_SEND_INLINE);
	PyObject *held = kept && new->held ? new->held : Py_None;
	struct rp_sent *sent = change_sent(p, index, NULL, held), *old;
	PyObject *sges = sent ? rp_make_sges(post, new) : NULL;

	/* From here on no code of Python's runs until all of it is in place. */
	old = sges ? swap_sent(p, sent) : NULL;
	if (old) {
		memcpy(rp_sges(&p->post, r), rp_sges(post, new),
		       count * sizeof(struct ibv_sge));
		memcpy(p->post.owners + r->owners, post->owners,
		       count * sizeof(PyObject *));
		new->held = swap(&r->held, new->held);
		sges = swap(&p->sg_lists[index], sges);
	}
	Py_XDECREF(sges);
	Py_XDECREF((PyObject *)(old ? old : sent));
	return old ? 0 : -1;
}

static int item_set_sg_list(PyObject *self, PyObject *value, void *unused)
{
	struct item *item = (struct item *)self;
	struct prepared *p = item->list;
	struct rp_turn turn;
	struct post post;
	int failed, right = 0;

	(void)unused;
	if (!p || !value || !is_open(p))
		return -1;
	failed = rp_reread_sges(&p->post, item->index, value, &post);
	if (!failed && !post.refusal.rule &&
	    post.requests->num_sge != p->post.requests[item->index].num_sge) {
		post.refusal.rule = "other_num_sge";
		post.refusal.a = (uint64_t)post.requests->num_sge;
		post.refusal.b =
			(uint64_t)p->post.requests[item->index].num_sge;
	}
	if (!failed && !post.refusal.rule) {
		failed = rp_begin_post(p->queue, p->owner, &turn);
		if (!failed) {
			rp_name_all(post.requests->held);
			post.requests->named = 1;
			right = rp_check(p->queue, p->owner, &post,
					 post.requests, 0);
			rp_end_post(p->queue, &turn);
		}
	}
	if (right)
		failed = p->sent ? put_sges(p, item->index, &post) : -1;
	else if (!failed)
		failed = refuse_value(p, &post, item->index);
	rp_free_post(&post);
	if (failed && !PyErr_Occurred())
		is_open(p);
	return failed;
}

static PyGetSetDef item_getset[] = {
	{ "wr_id", item_wr_id, item_set_wr_id,
	  "Comes back in the completion, 0..2^64-1.", NULL },
	{ "sg_list", item_sg_list, item_set_sg_list,
	  "Local buffers; as many can be put there as there were.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot item_slots[] = {
	{ Py_tp_init, item_init },
	{ Py_tp_dealloc, item_dealloc },
	{ Py_tp_traverse, item_traverse },
	{ Py_tp_getset, item_getset },
	{ 0, NULL },
};

static PyType_Spec item_spec = {
	.name = "rdmapost._verbs.PreparedItem",
	.basicsize = sizeof(struct item),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = item_slots,
};

/* ---- a number of it ------------------------------------------------------- */

/* A descriptor as property is, for a field of rdmapost/fields.py by its index. */
struct number {
	PyObject_HEAD
	PyObject *kind; /* the class of work requests */
	int index;
};

static int number_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct number *n = (struct number *)self;
	PyObject *kind;

	(void)kwargs;
	if (n->kind) {
		PyErr_SetString(PyExc_TypeError, "it has been initialised");
		return -1;
	}
	if (!PyArg_ParseTuple(args, "O!i", &PyType_Type, &kind, &n->index))
		return -1;
	n->kind = Py_NewRef(kind);
	return 0;
}

static void number_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	Py_XDECREF(((struct number *)self)->kind);
	PyObject_Free(self);
	Py_DECREF(type);
}

/* The field, and where an item has it; NULL with an exception. */
static const struct field *place(struct number *n, PyObject *object, void **at)
{
	struct item *item = (struct item *)object;
	const struct kind *kind;
	struct request *r;

	if (PyObject_TypeCheck(object, (PyTypeObject *)item_type) && item->list) {
		r = &item->list->post.requests[item->index];
		kind = r->kind;
		if (kind->type == n->kind && n->index >= 0 &&
		    n->index < kind->fields) {
			*at = item->list->post.records + r->record +
			      kind->field[n->index].at;
			return &kind->field[n->index];
		}
	}
	PyErr_SetString(PyExc_TypeError, "a work request of another class");
	return NULL;
}

static PyObject *number_get(PyObject *self, PyObject *object, PyObject *type)
{
	const struct field *field;
	void *at;

	(void)type;
	if (!object)
		return Py_NewRef(self);
	field = place((struct number *)self, object, &at);
	if (!field)
		return NULL;
	if (field->size == 8)
		return PyLong_FromUnsignedLongLong(*(uint64_t *)at);
	if (field->size == 2)
		return PyLong_FromUnsignedLong(*(uint16_t *)at);
	return PyLong_FromUnsignedLong(field->what == NETWORK ?
					       be32toh(*(uint32_t *)at) :
					       *(uint32_t *)at);
}

static int number_set(PyObject *self, PyObject *object, PyObject *value)
{
	struct prepared *p;
	const struct field *field;
	struct post post;
	uint64_t number;
	int read, failed;
	void *at;

	field = place((struct number *)self, object, &at);
	if (!field)
		return -1;
	p = ((struct item *)object)->list;
	if (!value) {
		PyErr_Format(PyExc_AttributeError, "%U cannot be deleted",
			     field->slot.name);
		return -1;
	}
	if (!is_open(p))
		return -1;
	memset(&post, 0, offsetof(struct post, few));
	read = rp_read_number(&post, field->slot.name, value,
			      8 * (unsigned int)field->size, &number);
	if (read > 0 && p->queue->checked && number % 8 &&
	    p->post.requests[((struct item *)object)->index].kind->atomic &&
	    field->at == offsetof(struct ibv_send_wr, wr.atomic.remote_addr)) {
		post.refusal.rule = "misaligned";
		post.refusal.a = number;
		read = 0;
	}
	if (read > 0)
		rp_put_number(field, at, number);
	failed = read < 0 ? -1 : read ? 0 :
		 refuse_value(p, &post, ((struct item *)object)->index);
	Py_XDECREF(post.refusal.name);
	Py_XDECREF(post.refusal.value);
	return failed;
}

static PyType_Slot number_slots[] = {
	{ Py_tp_init, number_init },
	{ Py_tp_dealloc, number_dealloc },
	{ Py_tp_descr_get, number_get },
	{ Py_tp_descr_set, number_set },
	{ 0, NULL },
};

static PyType_Spec number_spec = {
	.name = "rdmapost._verbs.Number",
	.basicsize = sizeof(struct number),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = number_slots,
};

int rp_add_prepared(PyObject *module)
{
	PyObject *number = PyType_FromSpec(&number_spec);
	int failed;

	/* Held for ever. */
	prepared_type = PyType_FromSpec(&prepared_spec);
	item_type = PyType_FromSpec(&item_spec);
	failed = !number || !prepared_type || !item_type ||
		 PyModule_AddObjectRef(module, "Prepared", prepared_type) ||
		 PyModule_AddObjectRef(module, "PreparedItem", item_type) ||
		 PyModule_AddObjectRef(module, "Number", number);
	Py_XDECREF(number);
	return failed ? -1 : 0;
}
