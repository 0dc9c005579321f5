/*
 * Posting: the queue that work requests are posted to (post.h says how).
 *
 * Whoever posts holds the queue's lock from the check to the device's return.  No
 * code of Python's runs there, but that of a device that is written in it.
 */
#include "post.h"

/* ---- with the lock held -------------------------------------------------- */

static int64_t submit(const struct queue *q, void *object, void *records)
{
	switch (q->verb) {
	case SEND:
		return rp_post_send(object, records);
	case RECV:
		return rp_post_recv(object, records);
	case SRQ_RECV:
		return rp_post_srq_recv(object, records);
	default:
		return rp_post_srq_ops(object, records);
	}
}

static int is_full(const struct queue *q, size_t more)
{
	return q->in_flight->posted - q->in_flight->done + more >= q->room;
}

/* Hold what it names, and check it; whether it may be posted. */
static int admit(struct queue *q, struct rp_handle *owner, struct post *post,
		 size_t index, size_t *adds, int type_1)
{
	struct request *r = &post->requests[index];
	struct rp_in_flight *list = q->in_flight->tagged;
	int add = list && r->kind->opcode == IBV_WR_TAG_ADD;

	if (is_full(q, index)) {
		post->refusal.rule = "full";
		return 0;
	}
	rp_name_all(r->held);
	r->named = 1;
	if (!rp_check(q, owner, post, r, type_1))
		return 0;
	if (add && q->checked && q->max_num_tags &&
	    list->posted - list->done + *adds >= q->max_num_tags) {
		post->refusal.rule = "list_full";
		return 0;
	}
	*adds += (size_t)add;
	return 1;
}

/* Give the records' references to what is held; the request keeps its own if it needs them. */
static PyObject *give(struct request *r, int keep)
{
	PyObject *held = r->held;

	if (keep && held) {
		Py_INCREF(held);
		rp_name_all(held);
	} else {
		r->held = NULL;
		r->named = 0;
	}
	return held;
}

void rp_put_pointers(struct post *post, const struct request *r)
{
	char *at = post->records + r->record;

	for (int i = 0; i < r->kind->fields; i++) {
		const struct field *field = &r->kind->field[i];
		struct rp_handle *h = field->what == ADDRESS_HANDLE ? r->ah :
				      field->what == WINDOW ? r->mw :
				      field->what == REGION ? r->mr : NULL;

		if (h)
			*(void **)(void *)(at + field->at) = h->address;
	}
}

static void record(struct queue *q, struct post *post, struct request *r)
{
	struct rp_in_flight *list = q->in_flight->tagged;
	char *at = post->records + r->record;
	PyObject *held = NULL;
	uint64_t removes = 0;

	if (r->ah || r->mw || r->mr)
		rp_put_pointers(post, r);
	/* Inline data has been copied when the call returns: the request holds it till then. */
	if (q->verb != SEND || !(r->flags & IBV_SEND_INLINE))
		held = give(r, r->mw != NULL);
	if (r->wr_id_of_tag) {
		r->tagged = rp_record(list, r->wr_id_of_tag, held, 1, 0);
		r->wr_id_of_tag = NULL;
		((struct ibv_ops_wr *)(void *)at)->tm.add.recv_wr_id = r->tagged;
		held = NULL;
	}
	if (r->tag && ((struct rp_tag_handle *)(void *)r->tag)->list == list) {
		struct rp_tag_handle *tag = (void *)r->tag;

		removes = tag->ticket;
		((struct ibv_ops_wr *)(void *)at)->tm.handle = tag->value;
	}
	r->ticket = rp_record(q->in_flight, Py_NewRef(r->wr_id), held, 1,
			      removes);
	/* Every work request begins with its wr_id. */
	*(uint64_t *)(void *)at = r->ticket;
}

/* Take back what was recorded; the requests let go of it. */
static void take_back(struct queue *q, struct request *r)
{
	struct rp_entry taken, tagged = { .wr_id = NULL };

	rp_unrecord(q->in_flight, r->ticket, 1, &taken);
	if (r->tagged)
		rp_unrecord(q->in_flight->tagged, r->tagged, 1, &tagged);
	Py_XDECREF(taken.wr_id); /* the request has it too */
	r->wr_id_of_tag = tagged.wr_id;
	if (!r->held) {
		r->held = taken.held ? taken.held : tagged.held;
		r->named = 1;
	} else if (taken.held) {
		rp_unname_all(taken.held);
		Py_DECREF(taken.held); /* the request has it too */
	}
}

/* A driver takes the key that the next bind replaces from the window's struct. */
static void note_bound(const struct post *post, struct request *r)
{
	const struct ibv_send_wr *wr = (void *)(post->records + r->record);

	((struct ibv_mw *)r->mw->address)->rkey = wr->bind_mw.rkey;
	r->unbound = rp_bind(r->mw, r->mr);
}

static struct rp_outcome outcome_of(int64_t result, size_t count)
{
	struct rp_outcome outcome = { (int)(result & UINT32_MAX),
				   (result >> 32) - 1 };

	if (!result)
		outcome.posted = (int64_t)count;
	else if (outcome.posted < 0 && (outcome.code == EOPNOTSUPP ||
					outcome.code == ENOSYS))
		/* Nothing of an unsupported call goes in; of another, who knows. */
		outcome.posted = 0;
	return outcome;
}

struct rp_outcome rp_submit(const struct queue *q, void *object, void *records,
			    size_t count)
{
	return outcome_of(submit(q, object, records), count);
}

/*
 * Check, record and submit; the number of those admitted, or -1 with an exception.
 * Of those that the device did not take, it says in `outcome`.
 */
static Py_ssize_t post_locked(struct queue *q, struct rp_handle *owner,
			      struct post *post, struct rp_outcome *outcome)
{
	size_t readable = post->count - (post->refusal.rule != NULL);
	size_t count = 0, adds = 0, in;

	if (!q->ready && readable) {
		post->refusal.rule = "not_ready";
		return 0;
	}
	if (rp_reserve(q->in_flight, readable) ||
	    (q->in_flight->tagged &&
	     rp_reserve(q->in_flight->tagged, readable)))
		return -1;
	while (count < readable && admit(q, owner, post, count, &adds, 0))
		count++;
	if (!count)
		return 0;
	for (size_t i = 0; i < count; i++)
		record(q, post, &post->requests[i]);
	rp_link(q, post, count);
	*outcome = rp_submit(q, owner->address, post->records, count);
	/* Where nobody knows, all counts as posted, so that its memory stays. */
	in = outcome->posted < 0 ? count : (size_t)outcome->posted;
	for (size_t i = count; i-- > in;)
		take_back(q, &post->requests[i]);
	for (size_t i = 0; i < in; i++)
		if (post->requests[i].mw)
			note_bound(post, &post->requests[i]);
	return (Py_ssize_t)count;
}

/* ---- without the lock ---------------------------------------------------- */

/* Have Python raise a PostError: always NULL. */
PyObject *rp_raise_refusal(PyObject *queue, struct rp_handle *owner,
			   struct post *post, size_t index, Py_ssize_t posted)
{
	const struct refusal *why = &post->refusal;
	PyObject *wrs = rp_wrs(post);
	PyObject *done = wrs ? PyObject_CallMethod(
		queue, "_refused", "OOnnsOOKK(KII)", (PyObject *)owner,
		wrs, (Py_ssize_t)index, posted, why->rule,
		why->name ? why->name : Py_None,
		why->value ? why->value : Py_None, (unsigned long long)why->a,
		(unsigned long long)why->b, (unsigned long long)why->sge.addr,
		why->sge.length, why->sge.lkey) : NULL;

	Py_XDECREF(wrs);
	Py_XDECREF(done);
	if (!PyErr_Occurred())
		PyErr_SetString(PyExc_SystemError, "a refusal was not raised");
	return NULL;
}

PyObject *rp_raise_failure(struct queue *q, struct rp_handle *owner,
			   const struct post *post, struct rp_outcome outcome)
{
	PyObject *wrs = rp_wrs(post);
	PyObject *done = !wrs ? NULL : PyObject_CallMethod((PyObject *)q, "_failed", "OOiL",
					     (PyObject *)owner, wrs,
					     outcome.code,
					     (long long)outcome.posted);

	Py_XDECREF(wrs);
	Py_XDECREF(done);
	if (!PyErr_Occurred())
		PyErr_SetString(PyExc_SystemError, "a failure was not raised");
	return NULL;
}

/* What follows from a post for the caller's objects; 0, or -1 with an exception. */
static int settle(struct queue *q, struct post *post, size_t in)
{
	for (size_t i = 0; i < in; i++) {
		struct request *r = &post->requests[i];
		const struct ibv_ops_wr *op =
			(void *)(post->records + r->record);
		PyObject *tag;
		int failed;

		if (!r->tagged)
			continue;
		tag = rp_make_tag_handle(q->in_flight->tagged, r->tagged,
					 op->tm.handle);
		failed = !tag || PyObject_SetAttrString(r->wr, "handle", tag);
		Py_XDECREF(tag);
		if (failed)
			return -1;
	}
	return 0;
}

int rp_begin_post(struct queue *q, struct rp_handle *owner,
		  struct rp_turn *turn)
{
	if (rp_begin_use(owner, &turn->use)) {
		rp_raise_closed(owner);
		return -1;
	}
	turn->nested = rp_owns(q->lock);
	if (turn->nested || !rp_take(q->lock))
		return 0;
	rp_end_use(&turn->use);
	return -1;
}

void rp_end_post(struct queue *q, struct rp_turn *turn)
{
	if (!turn->nested)
		rp_give(q->lock);
	rp_drop_done(q->in_flight);
	rp_end_use(&turn->use);
}

static struct rp_handle *to_handle(PyObject *object)
{
	static PyTypeObject *known; /* a queue pair's, nearly always */

	if (Py_TYPE(object) == known)
		return (struct rp_handle *)object;
	if (PyObject_TypeCheck(object, (PyTypeObject *)rp_handle_type)) {
		if (Py_TYPE(object) != known)
			known = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(object));
		return (struct rp_handle *)object;
	}
	PyErr_SetString(PyExc_TypeError, "expected what owns the queue");
	return NULL;
}

/* post(owner, wrs): the queue pair or SRQ; a work request, or a sequence of them. */
static PyObject *queue_post(PyObject *self, PyObject *const *args,
			    Py_ssize_t nargs)
{
	struct queue *q = (struct queue *)self;
	struct rp_handle *owner = nargs == 2 ? to_handle(args[0]) : NULL;
	struct rp_outcome outcome = { 0, 0 };
	PyObject *answer = NULL;
	Py_ssize_t count;
	struct rp_turn turn;
	struct post post;
	size_t in;

	if (!owner || !q->lock) {
		if (!PyErr_Occurred())
			PyErr_SetString(PyExc_TypeError, "post(owner, wrs)");
		return NULL;
	}
	if (rp_read(q, args[1], &post) || rp_begin_post(q, owner, &turn)) {
		rp_free_post(&post);
		return NULL;
	}
	count = post.count ? post_locked(q, owner, &post, &outcome) : 0;
	rp_end_post(q, &turn);
	in = count < 1 || outcome.posted < 0 ? 0 : (size_t)outcome.posted;
	if (count < 0 || settle(q, &post, in))
		answer = NULL;
	else if (outcome.code)
		answer = rp_raise_failure(q, owner, &post, outcome);
	else if (post.refusal.rule)
		answer = rp_raise_refusal(self, owner, &post, (size_t)count, (Py_ssize_t)in);
	else
		answer = Py_NewRef(Py_None);
	rp_free_post(&post);
	return answer;
}

/*
 * bind_mw(owner, wr, call, bind, at, sure): bind a window of type 1 (ibv_bind_mw(3)).
 * `call` is C's: given the queue pair, the window and `bind`, a struct ibv_mw_bind at the
 * address `at`, it returns 0 or None, or an errno, or raises where it has done nothing.
 * `sure`: what fails is not posted.
 */
static PyObject *queue_bind_mw(PyObject *self, PyObject *args)
{
	struct queue *q = (struct queue *)self;
	struct ibv_mw_bind *bind;
	struct rp_outcome outcome = { 0, 0 };
	PyObject *object, *wr, *call, *struct_bind, *done = NULL, *answer = NULL;
	unsigned long long at;
	struct rp_handle *owner;
	struct request *r;
	struct rp_turn turn;
	struct post post;
	size_t adds = 0;
	int sure, admitted = 0;

	if (!PyArg_ParseTuple(args, "OOOOKp", &object, &wr, &call, &struct_bind,
			      &at, &sure))
		return NULL;
	bind = (void *)(uintptr_t)at;
	owner = to_handle(object);
	if (!owner)
		return NULL;
	if (rp_read(q, wr, &post) || rp_begin_post(q, owner, &turn)) {
		rp_free_post(&post);
		return NULL;
	}
	r = &post.requests[0];
	if (!q->ready)
		post.refusal.rule = "not_ready";
	if (!post.refusal.rule && !rp_reserve(q->in_flight, 1))
		admitted = admit(q, owner, &post, 0, &adds, 1);
	if (admitted) {
		const struct ibv_send_wr *from = (void *)post.records;
		struct ibv_mw *mw = r->mw->address;
		uint32_t rkey = mw->rkey;

		record(q, &post, r);
		bind->wr_id = r->ticket;
		bind->send_flags = from->send_flags;
		bind->bind_info = from->bind_mw.bind_info;
		done = PyObject_CallFunctionObjArgs(call, owner->cdata,
						    r->mw->cdata, struct_bind,
						    NULL);
		outcome.code = done && done != Py_None ?
				       abs((int)PyLong_AsLong(done)) : 0;
		outcome.posted = done && !outcome.code;
		if (!outcome.posted)
			mw->rkey = rkey;
		if (!done || (outcome.code && (sure || outcome.code == EOPNOTSUPP ||
					       outcome.code == ENOSYS)))
			take_back(q, r);
		else if (outcome.code)
			outcome.posted = -1; /* the device may complete it yet */
		if (outcome.posted)
			r->unbound = rp_bind(r->mw, r->mr);
	}
	rp_end_post(q, &turn);
	if (PyErr_Occurred())
		answer = NULL;
	else if (outcome.code)
		answer = rp_raise_failure(q, owner, &post, outcome);
	else if (post.refusal.rule)
		answer = rp_raise_refusal(self, owner, &post, 0, 0);
	else
		answer = Py_NewRef(Py_None);
	Py_XDECREF(done);
	rp_free_post(&post);
	return answer;
}

/* ---- the type ------------------------------------------------------------ */

static int take_kinds(struct queue *q, PyObject *kinds)
{
	for (Py_ssize_t i = 0; i < PyTuple_Size(kinds); i++) {
		int index;
		unsigned int flags;

		if (!PyArg_ParseTuple(PyTuple_GetItem(kinds, i), "iI", &index,
				      &flags))
			return -1;
		if (index < 0 || index >= rp_kinds_known) {
			PyErr_SetString(PyExc_ValueError, "no such class");
			return -1;
		}
		q->takes[index] = 1;
		q->flags[index] = flags;
	}
	return 0;
}

/* See rdmapost/posting.py for the arguments. */
static int queue_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "verb", "in_flight", "lock", "checked", "pd",
				 "room", "datagram", "binds", "max_sge",
				 "max_msg_size", "max_inline_data",
				 "max_tso_header", "max_num_tags", "kinds",
				 NULL };
	struct queue *q = (struct queue *)self;
	unsigned long long room, pd, max_msg_size, max_inline, max_header,
		max_tags;
	PyObject *in_flight, *lock, *kinds;

	if (q->lock) {
		PyErr_SetString(PyExc_TypeError, "it has been initialised");
		return -1;
	}
	if (!PyArg_ParseTupleAndKeywords(
		    args, kwargs, "iO!O!pKKppiKKKKO!", names, &q->verb,
		    rp_in_flight_type, &in_flight, rp_lock_type, &lock,
		    &q->checked, &pd, &room, &q->datagram, &q->binds,
		    &q->max_sge, &max_msg_size, &max_inline, &max_header,
		    &max_tags, &PyTuple_Type, &kinds) ||
	    take_kinds(q, kinds))
		return -1;
	if (q->verb < SEND || q->verb > SRQ_OPS) {
		PyErr_SetString(PyExc_ValueError, "there is no such verb");
		return -1;
	}
	q->pd = (void *)(uintptr_t)pd;
	q->room = room;
	q->max_msg_size = max_msg_size;
	q->max_inline_data = max_inline;
	q->max_tso_header = max_header;
	q->max_num_tags = max_tags;
	q->in_flight = (struct rp_in_flight *)Py_NewRef(in_flight);
	q->lock = (struct rp_lock *)Py_NewRef(lock);
	return 0;
}

static int queue_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT((PyObject *)((struct queue *)self)->in_flight);
	return 0;
}

static void queue_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	struct queue *q = (struct queue *)self;
	freefunc free = (freefunc)PyType_GetSlot(type, Py_tp_free);

	PyObject_GC_UnTrack(self);
	Py_XDECREF((PyObject *)q->in_flight);
	Py_XDECREF((PyObject *)q->lock);
	free(self);
	Py_DECREF(type);
}

/* set_ready(ready): whether the state of the queue takes work requests. */
static PyObject *queue_set_ready(PyObject *self, PyObject *ready)
{
	int now = PyObject_IsTrue(ready);

	if (now < 0)
		return NULL;
	((struct queue *)self)->ready = now;
	Py_RETURN_NONE;
}

static PyMethodDef queue_methods[] = {
	RP_METHOD_NAMED("post", queue_post),
	{ "bind_mw", queue_bind_mw, METH_VARARGS, NULL },
	{ "set_ready", queue_set_ready, METH_O, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot queue_slots[] = {
	{ Py_tp_init, queue_init },
	{ Py_tp_dealloc, queue_dealloc },
	{ Py_tp_traverse, queue_traverse },
	{ Py_tp_methods, queue_methods },
	{ 0, NULL },
};

static PyType_Spec queue_spec = {
	.name = "rdmapost._verbs.Queue",
	.basicsize = sizeof(struct queue),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = queue_slots,
};

PyObject *rp_queue_type;

int rp_add_queue(PyObject *module)
{
	rp_queue_type = PyType_FromSpec(&queue_spec); /* held for ever */
	return rp_queue_type ? PyModule_AddObjectRef(module, "Queue",
						     rp_queue_type) : -1;
}
