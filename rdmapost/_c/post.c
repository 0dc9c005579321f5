/*
 * Posting: the queue that work requests are posted to (post.h says how).
 *
 * Whoever posts holds the queue's lock from the check to the device's return.  No
 * code of Python's runs there, but that of a device that is written in it.
 */
#include "post.h"
#include "soft.h"

/* ---- with the lock held -------------------------------------------------- */

/* How many more work requests the queue takes. */
static uint64_t room(const struct queue *q)
{
	uint64_t outstanding = q->in_flight->posted - q->in_flight->done;

	return q->room > outstanding ? q->room - outstanding : 0;
}

/* A list of tagged receives has its own limit; `adds` counts those that this post adds. */
static int check_tags(struct queue *q, struct post *post, const struct request *r, size_t *adds)
{
	struct rp_in_flight *list = q->in_flight->tagged;

	if (r->kind->opcode != IBV_WR_TAG_ADD)
		return 1;
	if (q->checked && q->max_num_tags && list->posted - list->done + *adds >= q->max_num_tags) {
		post->refusal.rule = "list_full";
		return 0;
	}
	++*adds;
	return 1;
}

/* Record a tagged receive that is added, and name the one that is removed; return that. */
static uint32_t record_tags(struct rp_in_flight *list, struct request *r, struct ibv_ops_wr *wr,
			    struct rp_entry *entry)
{
	struct rp_tag_handle *tag = (void *)r->tag;

	if (r->wr_id_of_tag) {
		r->tagged = rp_record(list, (struct rp_entry){ .wr_id = r->wr_id_of_tag,
							       .held = entry->held, .count = 1,
							       .state = RP_POSTED });
		r->wr_id_of_tag = NULL;
		entry->held = NULL;
		wr->tm.add.recv_wr_id = r->tagged;
	}
	if (!tag || tag->list != list)
		return 0;
	wr->tm.handle = tag->value;
	return (uint32_t)tag->ticket;
}

static void record(struct queue *q, struct post *post, struct request *r)
{
	struct ibv_send_wr *wr = (void *)(post->records + r->record);
	struct rp_entry entry = { .wr_id = Py_NewRef(r->wr_id), .count = 1, .state = RP_POSTED };

	/* Inline data has been copied when the call returns: the request holds it till then. */
	if (q->verb != SEND || r->mw || !(r->flags & IBV_SEND_INLINE)) {
		entry.held = r->held;
		/* A window is looked at when the device has returned. */
		r->held = r->mw ? Py_NewRef(r->held) : NULL;
		r->named = 0;
	}
	if (r->mw)
		entry.state = post->binding && !wr->bind_mw.bind_info.length ? RP_UNBIND : RP_BIND;
	if (q->in_flight->tagged)
		entry.removes = record_tags(q->in_flight->tagged, r, (void *)wr, &entry);
	/* Every work request begins with its wr_id. */
	wr->wr_id = r->ticket = rp_record(q->in_flight, entry);
}

/* Check and record one after another; how many. */
static size_t record_each(struct queue *q, struct rp_handle *owner, struct post *post, size_t count)
{
	uint64_t left = room(q);
	size_t admitted = 0, adds = 0;

	for (; admitted < count; admitted++) {
		struct request *r = &post->requests[admitted];

		if (admitted == left)
			post->refusal.rule = "full";
		if (admitted == left || !rp_check(q, owner, post, r) ||
		    (q->in_flight->tagged && !check_tags(q, post, r, &adds)))
			break;
	}
	for (size_t i = 0; i < admitted; i++) {
		record(q, post, &post->requests[i]);
		rp_link(post, i, admitted);
	}
	return admitted;
}

/* Record a prepared list with one entry: its work requests have consecutive tickets. */
static size_t record_list(struct queue *q, struct post *post, struct rp_sent *sent)
{
	uint64_t ticket = rp_record(q->in_flight,
				    (struct rp_entry){ .wr_id = Py_NewRef((PyObject *)sent),
						       .count = (uint32_t)post->count,
						       .state = RP_POSTED });

	for (size_t i = 0; i < post->count; i++) {
		uint64_t *wr_id = (void *)(post->records + post->requests[i].record);

		*wr_id = (ticket & ~(uint64_t)UINT32_MAX) | ((ticket + i) & UINT32_MAX);
	}
	return post->count;
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

/* Bind a window of type 1: a device's code may run, and raise where it has done nothing. */
static struct rp_outcome bind(struct rp_handle *owner, const struct post *post)
{
	const struct binding *b = post->binding;
	const struct request *r = post->requests;
	const struct ibv_send_wr *from = (void *)post->records;
	struct ibv_mw *mw = r->mw->address;
	uint32_t rkey = mw->rkey;
	struct rp_outcome outcome;
	PyObject *done;
	int code;

	b->at->wr_id = r->ticket;
	b->at->send_flags = from->send_flags;
	b->at->bind_info = from->bind_mw.bind_info;
	done = PyObject_CallFunctionObjArgs(b->call, owner->cdata, r->mw->cdata, b->bind, NULL);
	code = !done ? EIO : done == Py_None ? 0 : abs((int)PyLong_AsLong(done));
	outcome = (struct rp_outcome){ code, !code };
	if (code)
		mw->rkey = rkey;
	if (done && code && !b->sure && code != EOPNOTSUPP && code != ENOSYS)
		/* The device may complete it yet. */
		outcome.posted = -1;
	Py_XDECREF(done);
	return outcome;
}

/* What a driver did not take is taken back, the latest first. */
static void submit(struct queue *q, struct rp_handle *owner, struct post *post,
		   const struct rp_sent *sent, size_t count, struct rp_outcome *outcome)
{
	/* Where nobody knows, all counts as posted, so that its memory stays. */
	size_t in = count;
	struct rp_entry taken;

	*outcome = post->binding ? bind(owner, post) :
				   rp_post_records(q->verb, owner->address, post->records, count);
	if (outcome->code && outcome->posted >= 0)
		in = (size_t)outcome->posted;
	if (sent && in < count) {
		uint64_t ticket = *(uint64_t *)(void *)(post->records + post->requests[in].record);

		rp_unrecord(q->in_flight, ticket, count - in, &taken);
		Py_XDECREF(taken.wr_id); /* the list has it too */
		return;
	}
	for (size_t i = count; i-- > in;)
		take_back(q, &post->requests[i]);
	for (size_t i = 0; !sent && !post->binding && i < in; i++) {
		const struct request *r = &post->requests[i];
		const struct ibv_send_wr *wr = (void *)(post->records + r->record);

		/* A driver takes the key that the next bind replaces from the window's struct. */
		if (r->mw && r->mw->address)
			((struct ibv_mw *)r->mw->address)->rkey = wr->bind_mw.rkey;
	}
}

/* ---- without the lock ---------------------------------------------------- */

static PyObject *wrs_of(const struct post *post)
{
	return post->wrs ? Py_NewRef(post->wrs) : PyTuple_Pack(1, post->one);
}

/* It raises, whatever comes: always NULL. */
static PyObject *raised(PyObject *done, PyObject *wrs)
{
	Py_XDECREF(done);
	Py_XDECREF(wrs);
	if (!PyErr_Occurred())
		PyErr_SetString(PyExc_SystemError, "nothing was raised");
	return NULL;
}

/* Takes over the reference to the work requests, which may be NULL. */
PyObject *rp_raise_refusal(struct queue *q, struct rp_handle *owner, PyObject *wrs,
			   const struct refusal *why, size_t index, Py_ssize_t posted)
{
	return raised(!wrs ? NULL : PyObject_CallMethod(
		(PyObject *)q, "_refused", "OOnnsOOKK(KII)", (PyObject *)owner, wrs,
		(Py_ssize_t)index, posted, why->rule, why->name ? why->name : Py_None,
		why->value ? why->value : Py_None, (unsigned long long)why->a,
		(unsigned long long)why->b, (unsigned long long)why->sge.addr, why->sge.length,
		why->sge.lkey), wrs);
}

PyObject *rp_raise_list_closed(struct queue *q, const struct post *post)
{
	return raised(PyObject_CallMethod((PyObject *)q, "_list_closed", "n",
					  (Py_ssize_t)post->count), NULL);
}

/* A TAG_ADD's handle is for the caller; 0, or -1 with an exception. */
static int give_handles(struct queue *q, struct post *post, size_t in)
{
	int failed = 0;

	for (size_t i = 0; !failed && i < in; i++) {
		struct request *r = &post->requests[i];
		const struct ibv_ops_wr *op = (void *)(post->records + r->record);
		PyObject *tag;

		if (!r->tagged)
			continue;
		tag = rp_make_tag_handle(q->in_flight->tagged, r->tagged, op->tm.handle);
		failed = !tag || PyObject_SetAttrString(r->wr, "handle", tag);
		Py_XDECREF(tag);
	}
	return failed;
}

int rp_wait_for_queue(struct queue *q)
{
	if (!rp_soft_busy())
		return rp_take(q->lock);
	/* Whoever has it may wait for the device, which this thread is in the middle of a verb of. */
	if (rp_try(q->lock))
		return 0;
	raised(PyObject_CallMethod((PyObject *)q, "_busy", NULL), NULL);
	return -1;
}

int rp_begin_post(struct queue *q, struct rp_handle *owner, struct rp_turn *turn)
{
	turn->me = rp_thread();
	if (rp_begin_use_by(turn->me, owner, &turn->use)) {
		rp_raise_closed(owner);
		return -1;
	}
	turn->nested = RP_LOAD(&q->lock->owner) == turn->me->mark;
	if (turn->nested || rp_try_for(q->lock, turn->me) || !rp_wait_for_queue(q))
		return 0;
	rp_end_use(&turn->use);
	return -1;
}

void rp_end_post(struct queue *q, struct rp_turn *turn)
{
	if (!turn->nested)
		rp_give_quickly(q->lock);
	rp_drop_done(q->in_flight);
	rp_end_use_by(turn->me, &turn->use);
}

PyObject *rp_post(struct queue *q, struct rp_handle *owner, struct post *post,
		  struct rp_sent *const *sent)
{
	size_t readable = post->count - (!sent && post->refusal.rule), count = 0, in;
	struct rp_outcome outcome = { 0, 0 };
	struct refusal *why = &post->refusal, refused;
	const char *rule = NULL;
	PyObject *wrs = NULL;
	struct rp_turn turn;
	int closed, failed = 0;

	if (rp_begin_post(q, owner, &turn))
		return NULL;
	closed = sent && !*sent;
	if (closed || !readable)
		;
	else if (!q->ready)
		rule = "not_ready";
	else if (rp_reserve(q->in_flight, sent ? 1 : readable) ||
		 (q->in_flight->tagged && rp_reserve(q->in_flight->tagged, readable)))
		failed = 1;
	else if (!sent)
		count = record_each(q, owner, post, readable);
	else if (room(q) < readable)
		rule = "full";
	else
		count = record_list(q, post, *sent);
	if (count)
		submit(q, owner, post, sent ? *sent : NULL, count, &outcome);
	in = outcome.posted < 0 ? 0 : (size_t)outcome.posted;
	if (sent && (rule || outcome.code)) {
		/* The list may be closed before it is said. */
		wrs = Py_NewRef(post->wrs);
		refused = (struct refusal){ .rule = rule };
		why = &refused;
		count = rule && strcmp(rule, "full") == 0 ? room(q) : 0;
	} else if (rule) {
		why->rule = rule;
	}
	rp_end_post(q, &turn);
	if (closed)
		return rp_raise_list_closed(q, post);
	if (failed || (post->binding && PyErr_Occurred()) ||
	    (!sent && q->in_flight->tagged && give_handles(q, post, in)))
		return NULL;
	if (!outcome.code && (sent ? !wrs : !why->rule))
		Py_RETURN_NONE;
	wrs = wrs ? wrs : wrs_of(post);
	if (!outcome.code)
		return rp_raise_refusal(q, owner, wrs, why, count, (Py_ssize_t)in);
	return raised(!wrs ? NULL : PyObject_CallMethod((PyObject *)q, "_failed", "OOiL",
							(PyObject *)owner, wrs, outcome.code,
							(long long)outcome.posted), wrs);
}

/* post(owner, wrs): the queue pair or SRQ; a work request, or a sequence of them. */
static PyObject *queue_post(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	struct queue *q = (struct queue *)self;
	struct post post;
	PyObject *answer;

	if (nargs != 2 || !q->lock || !rp_is_handle(args[0])) {
		PyErr_SetString(PyExc_TypeError, "post(owner, wrs)");
		return NULL;
	}
	answer = rp_read(q, args[1], &post) ? NULL :
		 rp_post(q, (struct rp_handle *)args[0], &post, NULL);
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
	PyObject *object, *wr, *answer = NULL;
	struct binding binding;
	unsigned long long at;
	struct post post;

	if (!PyArg_ParseTuple(args, "O!OOOKp", rp_handle_type, &object, &wr, &binding.call,
			      &binding.bind, &at, &binding.sure))
		return NULL;
	binding.at = (void *)(uintptr_t)at;
	if (!rp_read(q, wr, &post)) {
		post.binding = &binding;
		answer = rp_post(q, (struct rp_handle *)object, &post, NULL);
	}
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
	struct queue *q = (struct queue *)self;

	PyObject_GC_UnTrack(self);
	Py_XDECREF((PyObject *)q->in_flight);
	Py_XDECREF((PyObject *)q->lock);
	rp_free(self);
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
	return rp_add_type(module, &queue_spec, "Queue", &rp_queue_type);
}
