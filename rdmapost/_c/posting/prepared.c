/*
 * Prepared lists: read and checked once, posted again and again.
 *
 * Posting a list (rp_post_list in post.c) gives its work requests their cookies, records them as
 * one entry in flight, and calls the verb. The objects that the list names stay held while it is
 * open, and while a post of it is outstanding.
 */
#include "posting/post.h"

#include <endian.h>

#include "parts.h"
#include "posting/rules.h"

/*
 * Any code can find a list through the garbage collector, even before the list is complete or after
 * it has been refused.
 */
enum { NEW, MAKING, REFUSED, WHOLE };

/*
 * In a WHOLE list, `sent`, and each request's `refs`, `sges` and `wr_id` can change. They change
 * with the queue's lock held, so that a post sees all of a change or none of it, and inside
 * RP_BEGIN(list). References to them are also taken inside RP_BEGIN(list).
 */
struct prepared {
	PyObject_HEAD
	struct work_queue *queue;
	struct rp_handle *owner;
	uint64_t state;
	PyObject *sent; /* the struct rp_sent of the next post; NULL once the list is closed */
	struct post post;
};

static PyObject *prepared_type;

/* Replace a reference, and return the old one. */
static PyObject *swap(PyObject **at, PyObject *object)
{
	PyObject *old = *at;

	*at = object;
	return old;
}

/* Whether the list is whole; if not, an exception is set. */
static int is_whole(struct prepared *p)
{
	if (RP_LOAD(&p->state) == WHOLE)
		return 1;
	PyErr_SetString(PyExc_TypeError, "the list has not been prepared");
	return 0;
}

static int is_open(struct prepared *p)
{
	if (!RP_LOAD(&p->sent))
		rp_raise_list_closed(&p->post);
	else if (!rp_is_here(p->owner))
		rp_raise_closed(p->owner);
	else
		return 1;
	return 0;
}

/*
 * Return a new reference to what the next post carries; NULL with an exception if the list is
 * closed.
 */
static PyObject *get_sent(struct prepared *p)
{
	PyObject *sent;

	RP_BEGIN(p);
	sent = Py_XNewRef(p->sent);
	RP_END();
	if (!sent)
		rp_raise_list_closed(&p->post);
	return sent;
}

/* ---- preparing ----------------------------------------------------------- */

/* Check all work requests; returns the index of the first that is refused, or -1. */
static Py_ssize_t check_all(struct prepared *p)
{
	struct post *post = &p->post;
	size_t readable = post->count - (post->refusal.rule != NULL);

	for (size_t i = 0; i < readable; i++) {
		struct request *r = &post->requests[i];

		if (r->type->opcode == IBV_WR_BIND_MW)
			rp_refuse(post, "bind_prepared", 0);
		else if (rp_check(p->queue, p->owner, post, r))
			continue;
		return (Py_ssize_t)i;
	}
	return post->refusal.rule ? (Py_ssize_t)readable : -1;
}

static PyObject *held_until_done(const struct prepared *p, const struct request *r)
{
	PyObject *refs = rp_held_until_done(p->queue, r);

	return refs ? refs : Py_None;
}

/*
 * Make the rp_sent that posts carry: each work request's wr_id, and the references that it holds
 * until it is done. Each tuple is filled before anything else is allocated, so that the collector
 * never sees an incomplete tuple.
 */
static PyObject *make_sent(const struct prepared *p)
{
	Py_ssize_t count = (Py_ssize_t)p->post.count;
	PyObject *wr_ids = PyTuple_New(count), *refs;

	for (Py_ssize_t i = 0; wr_ids && i < count; i++)
		PyTuple_SetItem(wr_ids, i, Py_NewRef(p->post.requests[i].wr_id));
	refs = wr_ids ? PyTuple_New(count) : NULL;
	for (Py_ssize_t i = 0; refs && i < count; i++)
		PyTuple_SetItem(refs, i, Py_NewRef(held_until_done(p, &p->post.requests[i])));
	return rp_make_sent(wr_ids, refs);
}

/* Return a copy of a tuple with `other` at an index, or the tuple itself if `other` is NULL. */
static PyObject *with(PyObject *tuple, size_t index, PyObject *other)
{
	Py_ssize_t count = PyTuple_Size(tuple);
	PyObject *copy;

	if (!other)
		return Py_NewRef(tuple);
	copy = PyTuple_New(count);
	for (Py_ssize_t i = 0; copy && i < count; i++)
		PyTuple_SetItem(copy, i, Py_NewRef((size_t)i == index ? other :
							PyTuple_GetItem(tuple, i)));
	return copy;
}

/*
 * Make a copy of `from` in which one work request has a different wr_id or references. This may
 * run a finalizer that changes the list: use the copy only if the list still has `from`.
 */
static PyObject *change_sent(const struct rp_sent *from, size_t index, PyObject *wr_id,
			     PyObject *refs)
{
	PyObject *wr_ids = with(from->wr_ids, index, wr_id);

	return rp_make_sent(wr_ids, wr_ids ? with(from->refs, index, refs) : NULL);
}

/* Make the parts of a list other than its work requests; 0, or -1 with an exception. */
static int make_whole(struct prepared *p)
{
	if (!p->post.count) {
		PyErr_SetString(PyExc_ValueError,
				"a prepared list needs at least one work request");
		return -1;
	}
	if (p->post.count > UINT32_MAX) {
		PyErr_SetString(PyExc_ValueError, "no queue holds so many work requests");
		return -1;
	}
	for (size_t i = 0; i < p->post.count; i++) {
		p->post.requests[i].sges = rp_make_sges(&p->post, &p->post.requests[i]);
		if (!p->post.requests[i].sges)
			return -1;
	}
	p->sent = make_sent(p);
	return p->sent ? 0 : -1;
}

/* Read, check and keep all work requests; 0, or -1 with an exception. */
static int prepare(struct prepared *p, PyObject *wrs)
{
	Py_ssize_t refused;
	struct rp_posting posting;
	int failed;

	/*
	 * The list outlives this call, so pack a single work request into a tuple, which it keeps.
	 */
	wrs = rp_wr_type_of(p->queue, Py_TYPE(wrs)) ? PyTuple_Pack(1, wrs) : Py_NewRef(wrs);
	if (!wrs)
		return -1;
	failed = rp_read(p->queue, wrs, &p->post);
	Py_DECREF(wrs);
	if (failed || rp_begin_post(p->queue, p->owner, &posting))
		return -1;
	if (!rp_is_open(p->owner)) {
		/* This thread is closing the owner, and may already have closed its lists. */
		rp_end_post(p->queue, &posting);
		rp_raise_closed(p->owner);
		return -1;
	}
	refused = check_all(p);
	for (size_t i = 0; refused < 0 && i < p->post.count; i++) {
		p->post.invalidates |= rp_invalidates(p->queue, p->post.requests[i].type);
		rp_link(&p->post, i, p->post.count);
	}
	rp_release(&p->queue->lock);
	failed = refused >= 0 || make_whole(p);
	if (failed)
		rp_unpin_requests(&p->post);
	else
		RP_STORE(&p->state, WHOLE);
	/* A close deferred until now either closes the list, too, or finds that it pins nothing. */
	rp_end_use_by(posting.me, &posting.use);
	if (refused >= 0)
		rp_raise_refusal(p->queue, p->owner, Py_NewRef(p->post.wrs), &p->post.refusal,
				 (size_t)refused, 0);
	return -failed;
}

static int prepared_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct prepared *p = (struct prepared *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT((PyObject *)p->queue);
	Py_VISIT((PyObject *)p->owner);
	Py_VISIT(p->sent);
	Py_VISIT(p->post.wrs);
	for (size_t i = 0; i < p->post.count; i++) {
		Py_VISIT(p->post.requests[i].refs);
		Py_VISIT(p->post.requests[i].sges);
	}
	return 0;
}

/* Release the list's references; its outstanding work requests keep theirs. */
static int release_held(PyObject *self)
{
	struct prepared *p = (struct prepared *)self;
	PyObject *sent, *wrs;

	RP_BEGIN(p);
	sent = swap(&p->sent, NULL);
	wrs = swap(&p->post.wrs, NULL);
	RP_END();
	for (size_t i = 0; i < p->post.count; i++) {
		struct request *r = &p->post.requests[i];
		PyObject *refs, *sges;
		int pinned;

		RP_BEGIN(p);
		refs = swap(&r->refs, NULL);
		sges = swap(&r->sges, NULL);
		pinned = r->pinned;
		r->pinned = 0;
		RP_END();
		if (pinned)
			rp_unpin_all(refs);
		Py_XDECREF(refs);
		Py_XDECREF(sges);
	}
	rp_drop_wr_id(sent);
	Py_XDECREF(wrs);
	return 0;
}

/*
 * Release everything before the collector clears any object in the same cycle: dropping the last
 * reference to a region closes it, and the region must still be intact then.
 */
static void prepared_finalize(PyObject *self)
{
	/* Through the collector, any code can find a list that is being prepared, and call this. */
	if (RP_LOAD(&((struct prepared *)self)->state) != MAKING)
		release_held(self);
}

/*
 * _prepare(queue, owner, wrs): call this once, after recording the list with its owner, so that
 * closing the owner closes the list.
 */
static PyObject *prepared_prepare(PyObject *self, PyObject *args)
{
	struct prepared *p = (struct prepared *)self;
	PyObject *queue, *owner, *wrs;
	uint64_t state = NEW;

	if (!PyArg_ParseTuple(args, "O!O!O", rp_queue_type, &queue, rp_handle_type, &owner, &wrs))
		return NULL;
	if (rp_check_owner((struct work_queue *)queue, owner))
		return NULL;
	if (!rp_swap_word(&p->state, &state, MAKING)) {
		PyErr_SetString(PyExc_TypeError, "it has already been prepared");
		return NULL;
	}
	p->queue = (struct work_queue *)Py_NewRef(queue);
	p->owner = (struct rp_handle *)Py_NewRef(owner);
	if (!prepare(p, wrs))
		Py_RETURN_NONE;
	RP_STORE(&p->state, REFUSED);
	release_held(self);
	return NULL;
}

static void prepared_dealloc(PyObject *self)
{
	struct prepared *p = (struct prepared *)self;

	PyObject_GC_UnTrack(self);
	release_held(self);
	rp_free_post(&p->post);
	Py_XDECREF((PyObject *)p->queue);
	Py_XDECREF((PyObject *)p->owner);
	rp_free(self);
}

/* ---- the list ------------------------------------------------------------ */

static PyObject *prepared_post(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	struct prepared *p = (struct prepared *)self;

	(void)args;
	if (nargs)
		return PyErr_Format(PyExc_TypeError, "post() takes no arguments");
	return is_whole(p) ? rp_post_list(p->queue, p->owner, &p->post, &p->sent) : NULL;
}

static PyObject *prepared_close(PyObject *self, PyObject *unused)
{
	struct prepared *p = (struct prepared *)self;
	PyObject *sent;

	(void)unused;
	/*
	 * The list has not been prepared yet. If the owner is closed in the meantime,
	 * QP._prepared() closes the list.
	 */
	if (RP_LOAD(&p->state) != WHOLE)
		Py_RETURN_NONE;
	/* Posts in progress hold their own references; later ones see that the list is closed. */
	if (rp_acquire(&p->queue->lock))
		return NULL;
	RP_BEGIN(p);
	sent = swap(&p->sent, NULL);
	RP_END();
	rp_release(&p->queue->lock);
	if (sent)
		release_held(self);
	rp_drop_wr_id(sent);
	Py_RETURN_NONE;
}

static PyObject *prepared_closed(PyObject *self, void *unused)
{
	struct prepared *p = (struct prepared *)self;

	(void)unused;
	return PyBool_FromLong(RP_LOAD(&p->state) != WHOLE || !RP_LOAD(&p->sent) || !rp_is_here(p->owner));
}

static Py_ssize_t prepared_length(PyObject *self)
{
	struct prepared *p = (struct prepared *)self;

	return is_whole(p) ? (Py_ssize_t)p->post.count : -1;
}

/* A whole list's work request; NULL with an exception. */
static struct request *request_at(PyObject *list, size_t index)
{
	struct prepared *p = (struct prepared *)list;

	if (!is_whole(p))
		return NULL;
	if (index < p->post.count)
		return &p->post.requests[index];
	PyErr_SetString(PyExc_IndexError, "no such work request");
	return NULL;
}

/* The class of a work request in the list. */
static PyObject *prepared_type_of(PyObject *self, PyObject *arg)
{
	size_t index = PyLong_AsSize_t(arg);
	const struct request *r = PyErr_Occurred() ? NULL : request_at(self, index);

	return r ? Py_NewRef(r->type->class) : NULL;
}

/* Whether `refs` is the object, or a tuple that contains it. */
static int is_among(PyObject *object, PyObject *refs)
{
	int found = refs == object;

	for (Py_ssize_t i = refs && PyTuple_CheckExact(refs) ? PyTuple_Size(refs) : 0; !found && i--;)
		found = PyTuple_GetItem(refs, i) == object;
	return found;
}

/* _names(resource): whether the list is open and names the resource. */
static PyObject *prepared_names(PyObject *self, PyObject *resource)
{
	struct prepared *p = (struct prepared *)self;
	int found = 0;

	RP_BEGIN(p);
	for (size_t i = 0; RP_LOAD(&p->state) == WHOLE && p->sent && !found && i < p->post.count; i++)
		found = is_among(resource, p->post.requests[i].refs);
	RP_END();
	return PyBool_FromLong(found);
}

static PyMethodDef prepared_methods[] = {
	/* Python calls a METH_FASTCALL function faster than one without arguments. */
	{ "post", (PyCFunction)(void (*)(void))prepared_post, METH_FASTCALL,
	  "post($self, /)\n--\n\nPost the whole list.\n\nRaises:\n"
	  "    PostError: a work request was refused, here or by the device.\n"
	  "    ClosedError: the list or its queue pair is closed." },
	{ "close", prepared_close, METH_NOARGS,
	  "close($self, /)\n--\n\n"
	  "Release the objects that the list names; outstanding posts still hold them." },
	{ "_prepare", prepared_prepare, METH_VARARGS, NULL },
	{ "_type_of", prepared_type_of, METH_O, NULL },
	{ "_names", prepared_names, METH_O, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef prepared_getset[] = {
	{ "closed", prepared_closed, NULL, "Whether the list is closed.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot prepared_slots[] = {
	{ Py_tp_dealloc, prepared_dealloc },
	{ Py_tp_traverse, prepared_traverse },
	{ Py_tp_clear, release_held },
	{ Py_tp_finalize, prepared_finalize },
	{ Py_tp_methods, prepared_methods },
	{ Py_tp_getset, prepared_getset },
	{ Py_sq_length, prepared_length },
	{ 0, NULL },
};

/* ---- one work request of a list ------------------------------------------ */

struct item {
	PyObject_HEAD
	struct prepared *list;
	struct request *request;
};

static PyObject *item_type;

static int item_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct item *item = (struct item *)self;
	struct request *request;
	PyObject *list;
	Py_ssize_t index;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "O!n", prepared_type, &list, &index))
		return -1;
	request = request_at(list, (size_t)index);
	if (!request)
		return -1;
	/* Reading the index may have run code that initialised the item. */
	if (item->list) {
		PyErr_SetString(PyExc_TypeError, "it has already been initialised");
		return -1;
	}
	item->request = request;
	item->list = (struct prepared *)Py_NewRef(list);
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
	PyObject_GC_UnTrack(self);
	Py_XDECREF((PyObject *)((struct item *)self)->list);
	rp_free(self);
}

/*
 * Return a new reference to the caller's work request, or NULL with an exception if the list is
 * closed. If `refs` is not NULL, sets `*refs` to a new reference to what the work request holds.
 */
static PyObject *get_wr(struct prepared *p, const struct request *r, PyObject **refs)
{
	PyObject *wr;

	RP_BEGIN(p);
	wr = p->sent ? Py_NewRef(r->wr) : NULL;
	if (wr && refs)
		*refs = Py_XNewRef(r->refs);
	RP_END();
	if (!wr)
		rp_raise_list_closed(&p->post);
	return wr;
}

/* Say why an attribute cannot be set (the item has no list) or deleted; always -1. */
static int refuse_change(struct prepared *p, const char *name)
{
	if (p)
		PyErr_Format(PyExc_AttributeError, "%s cannot be deleted", name);
	else
		PyErr_SetString(PyExc_TypeError, "it has not been initialised");
	return -1;
}

/* Raise a TypeError or ValueError that says why a work request was refused; always -1. */
static int refuse_value(struct prepared *p, const struct request *r, const struct refusal *why)
{
	PyObject *wr = get_wr(p, r, NULL);

	/* Reading the value may have closed the list; so may making the tuple. */
	if (!wr)
		return -1;
	rp_raise_refusal(p->queue, p->owner, PyTuple_Pack(1, wr), why, 0, -1);
	Py_DECREF(wr);
	return -1;
}

/*
 * Read a number for a field of a work request, or for its wr_id if `field` is NULL. Returns 0, or
 * -1 with an exception that says what is wrong with the number.
 */
static int read_value(struct prepared *p, const struct request *r, const struct field *field,
		      PyObject *value, uint64_t *number)
{
	PyObject *name = field ? field->slot.name : r->type->wr_id.name;
	const char *broken;
	struct post post;
	int read;

	PyErr_Clear();
	if (!value) {
		PyErr_Format(PyExc_AttributeError, "%U cannot be deleted", name);
		return -1;
	}
	if (!is_open(p) || rp_enter_call())
		return -1;
	post.refusal = (struct refusal){ .rule = NULL };
	read = rp_read_number(&post, name, value, field ? field->max : UINT64_MAX, number);
	broken = read > 0 && field ? rp_rule_of_number(p->queue, r->type, field, *number) : NULL;
	if (broken)
		read = rp_refuse(&post, broken, *number);
	if (!read)
		refuse_value(p, r, &post.refusal);
	Py_XDECREF(post.refusal.owned);
	rp_leave_call();
	return read > 0 ? 0 : -1;
}

static PyObject *item_wr_id(PyObject *self, void *unused)
{
	struct item *item = (struct item *)self;
	PyObject *wr_id;

	(void)unused;
	if (!item->list)
		Py_RETURN_NONE;
	RP_BEGIN(item->list);
	wr_id = Py_NewRef(item->request->wr_id);
	RP_END();
	return wr_id;
}

/* Put an SGE list into the place of one of the same length. */
static void put_sges(struct prepared *p, struct request *r, const struct post *post)
{
	struct request *new = post->requests;
	size_t count = (size_t)r->num_sge;

	memcpy(rp_sges(&p->post, r), rp_sges(post, new), count * sizeof(struct ibv_sge));
	memcpy(p->post.owners + r->owners, post->owners, count * sizeof(PyObject *));
	/* The handles in both are pinned. */
	new->refs = swap(&r->refs, new->refs);
}

/*
 * If the list still has `from`, store a wr_id or, if `post` is not NULL, check what was read into
 * it, and store its SGEs or refuse them. `*object`, the wr_id or the SGEs, is then what was stored
 * before. Returns 1; 0 if the list has changed; or -1 with an exception.
 */
static int try_change(struct prepared *p, struct request *r, PyObject **object, struct post *post,
		      PyObject *from)
{
	PyObject *sent = change_sent((struct rp_sent *)from, (size_t)(r - p->post.requests),
				     post ? NULL : *object,
				     post ? held_until_done(p, post->requests) : NULL);
	int same = -1;

	if (sent && !rp_acquire(&p->queue->lock)) {
		/* No Python code runs from here until all of the change is in place. */
		RP_BEGIN(p);
		same = p->sent == from;
		if (same && (!post || rp_check(p->queue, p->owner, post, post->requests))) {
			if (post)
				put_sges(p, r, post);
			sent = swap(&p->sent, sent);
			*object = swap(post ? &r->sges : &r->wr_id, *object);
		}
		RP_END();
		rp_release(&p->queue->lock);
	}
	rp_drop_wr_id(sent);
	return same;
}

/* Change a work request, as try_change() does; 0, or -1 with an exception. */
static int change(struct prepared *p, struct request *r, PyObject **object, struct post *post)
{
	struct rp_use use;
	PyObject *from;
	int done = 0;

	/* Closes are deferred while the change still needs the old references. */
	if (rp_begin_use(p->owner, &use)) {
		rp_raise_closed(p->owner);
		return -1;
	}
	while (!done) {
		from = get_sent(p);
		done = from ? try_change(p, r, object, post, from) : -1;
		Py_XDECREF(from);
	}
	if (post)
		rp_unpin_requests(post);
	rp_end_use(&use);
	return done > 0 ? 0 : -1;
}

static int item_set_wr_id(PyObject *self, PyObject *value, void *unused)
{
	struct item *item = (struct item *)self;
	struct prepared *p = item->list;
	PyObject *wr_id;
	uint64_t number;
	int failed;

	(void)unused;
	if (!p)
		return refuse_change(p, "wr_id");
	if (read_value(p, item->request, NULL, value, &number))
		return -1;
	wr_id = PyLong_FromUnsignedLongLong(number);
	failed = wr_id ? change(p, item->request, &wr_id, NULL) : -1;
	Py_XDECREF(wr_id);
	return failed;
}

static PyObject *item_sg_list(PyObject *self, void *unused)
{
	struct item *item = (struct item *)self;
	PyObject *sges;

	(void)unused;
	if (!item->list)
		return PyTuple_New(0);
	RP_BEGIN(item->list);
	sges = Py_XNewRef(item->request->sges);
	RP_END();
	if (sges && rp_has_type(sges, rp_known.sge))
		return rp_make_tuple((PyObject *)&PyTuple_Type, &sges, 1);
	return sges ? sges : PyTuple_New(0);
}

/* Replace an SGE with one of the same region; returns 0 for another region or a refused SGE. */
static int put_sge(struct prepared *p, struct request *r, PyObject *value)
{
	struct ibv_sge *sge = rp_sges(&p->post, r), old, new;
	struct rp_posting posting;
	int same;

	if (r->num_sge != 1 || !rp_read_exact_sge(value, &new))
		return 0;
	if (rp_begin_post(p->queue, p->owner, &posting)) {
		PyErr_Clear();
		return 0;
	}
	RP_BEGIN(p);
	old = *sge;
	same = p->sent && p->post.owners[r->owners] == rp_item(value, 3) &&
	       rp_is_open((struct rp_handle *)rp_item(value, 3));
	if (same) {
		*sge = new;
		same = rp_check_again(p->queue, p->owner, &p->post, r);
	}
	if (same)
		value = swap(&r->sges, Py_NewRef(value));
	else
		*sge = old;
	p->post.refusal.rule = NULL;
	RP_END();
	rp_end_post(p->queue, &posting);
	if (same)
		Py_DECREF(value);
	return same;
}

/* Read and check a new SGE list, and replace the old one with it; 0, or -1 with an exception. */
static int change_sges(struct prepared *p, struct request *r, PyObject *value, struct post *post)
{
	const struct request *new = post->few;
	PyObject *sges;
	int failed;

	if (rp_reread_sges(&p->post, r, value, post))
		return -1;
	if (!post->refusal.rule && new->num_sge != r->num_sge) {
		rp_refuse(post, "other_num_sge", (uint64_t)new->num_sge);
		post->refusal.b = (uint64_t)r->num_sge;
	}
	if (!post->refusal.rule) {
		sges = rp_make_sges(post, new);
		failed = sges ? change(p, r, &sges, post) : -1;
		Py_XDECREF(sges);
		if (failed)
			return -1;
	}
	return post->refusal.rule ? refuse_value(p, r, &post->refusal) : 0;
}

static int item_set_sg_list(PyObject *self, PyObject *value, void *unused)
{
	struct item *item = (struct item *)self;
	struct prepared *p = item->list;
	PyObject *wr, *refs;
	struct post post;
	int failed;

	(void)unused;
	if (!p || !value)
		return refuse_change(p, "sg_list");
	if (put_sge(p, item->request, value))
		return 0;
	/* Reading may run code that closes the list; `wr` and `refs` keep its objects alive. */
	if (rp_enter_call())
		return -1;
	wr = get_wr(p, item->request, &refs);
	if (!wr) {
		rp_leave_call();
		return -1;
	}
	failed = change_sges(p, item->request, value, &post);
	rp_free_post(&post);
	Py_XDECREF(refs);
	Py_DECREF(wr);
	rp_leave_call();
	return failed;
}

static PyGetSetDef item_getset[] = {
	{ "wr_id", item_wr_id, item_set_wr_id,
	  "Comes back in the completion, 0..2^64-1.", NULL },
	{ "sg_list", item_sg_list, item_set_sg_list,
	  "Local buffers; a new list must have as many SGEs as the old one.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot item_slots[] = {
	{ Py_tp_init, item_init },
	{ Py_tp_dealloc, item_dealloc },
	{ Py_tp_traverse, item_traverse },
	{ Py_tp_getset, item_getset },
	{ 0, NULL },
};

/* ---- its numbers ---------------------------------------------------------- */

/*
 * A descriptor, like `property`, for a numeric field of a work request; `index` is the field's
 * index in the class's row of rdmapost/posting/fields.py.
 */
struct number {
	PyObject_HEAD
	PyObject *class; /* the class of work requests */
	int index;
};

static int number_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct number *n = (struct number *)self;
	PyObject *class;
	int index;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "O!i", &PyType_Type, &class, &index))
		return -1;
	if (n->class) {
		PyErr_SetString(PyExc_TypeError, "it has already been initialised");
		return -1;
	}
	n->index = index;
	n->class = Py_NewRef(class);
	return 0;
}

static void number_dealloc(PyObject *self)
{
	Py_XDECREF(((struct number *)self)->class);
	rp_free(self);
}

/* Return the field, and set `*at` to its address in an item; NULL with an exception. */
static const struct field *place(struct number *n, PyObject *object, void **at)
{
	struct item *item = (struct item *)object;
	const struct wr_type *type;
	const struct field *field;

	if (PyObject_TypeCheck(object, (PyTypeObject *)item_type) && item->list) {
		type = item->request->type;
		field = type->class == n->class && n->index >= 0 && n->index < type->fields ?
				&type->field[n->index] : NULL;
		if (field && (field->what == NUMBER || field->what == NETWORK)) {
			*at = item->list->post.structs + item->request->at + field->at;
			return field;
		}
	}
	PyErr_SetString(PyExc_TypeError,
			"the work request is of another class, or the field is not a number");
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
	return PyLong_FromUnsignedLong(field->what == NETWORK ? be32toh(*(uint32_t *)at) :
					       *(uint32_t *)at);
}

static int number_set(PyObject *self, PyObject *object, PyObject *value)
{
	const struct field *field;
	const struct request *r;
	struct prepared *p;
	uint64_t number;
	void *at;

	field = place((struct number *)self, object, &at);
	if (!field)
		return -1;
	p = ((struct item *)object)->list;
	r = ((struct item *)object)->request;
	if ((!value || !RP_LOAD(&p->sent) || !rp_is_here(p->owner) ||
	     !rp_read_int(value, field->max, &number) ||
	     rp_rule_of_number(p->queue, r->type, field, number)) &&
	    read_value(p, r, field, value, &number))
		return -1;
	rp_put_number(field, at, number);
	return 0;
}

static PyType_Slot number_slots[] = {
	{ Py_tp_init, number_init },
	{ Py_tp_dealloc, number_dealloc },
	{ Py_tp_descr_get, number_get },
	{ Py_tp_descr_set, number_set },
	{ 0, NULL },
};

int rp_add_prepared(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.Number", sizeof(struct number), 0,
			   number_slots, NULL) ||
	       rp_add_type(module, "rdmapost._verbs.Prepared", sizeof(struct prepared),
			   Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, prepared_slots, &prepared_type) ||
	       rp_add_type(module, "rdmapost._verbs.PreparedItem", sizeof(struct item),
			   Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, item_slots, &item_type) ? -1 : 0;
}
