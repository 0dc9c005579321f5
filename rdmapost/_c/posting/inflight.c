/* Records of posted work requests, which translate cookies into wr_ids (inflight.h). */
#include "posting/inflight.h"

#include "handles/exceptions.h"
#include "parts.h"
#include "posting/wr_types.h"

PyObject *rp_in_flight_type, *rp_sent_type;

/* ---- what an entry holds ------------------------------------------------ */

/* Whether an object that a work request holds is a handle; tests for the usual types first. */
static inline int is_handle(PyObject *object)
{
	return rp_has_type(object, rp_known.mr) || rp_has_type(object, rp_known.ah) ||
	       (object != Py_None && !PyBytes_CheckExact(object) && rp_is_handle(object));
}

/* Pin or unpin a handle, or those in a tuple; returns the first that is not open, or NULL. */
static PyObject *each(PyObject *refs, int unpin)
{
	int many = refs && PyTuple_CheckExact(refs);
	Py_ssize_t count = many ? Py_SIZE(refs) : refs != NULL;
	PyObject *closed = NULL;

	for (Py_ssize_t i = count; i--;) {
		PyObject *one = many ? rp_item(refs, i) : refs;
		PyObject *found = NULL;

		if (PyTuple_CheckExact(one)) {
			found = each(one, unpin);
		} else if (is_handle(one) && unpin) {
			rp_unpin((struct rp_handle *)one);
		} else if (is_handle(one)) {
			rp_pin((struct rp_handle *)one);
			found = rp_is_open((struct rp_handle *)one) ? NULL : one;
		}
		closed = found ? found : closed;
	}
	return closed;
}

PyObject *rp_pin_all(PyObject *refs)
{
	return each(refs, 0);
}

void rp_unpin_all(PyObject *refs)
{
	each(refs, 1);
}

/* ---- the entries -------------------------------------------------------- */

static struct rp_entry *at(const struct rp_in_flight *q, uint64_t index)
{
	return &q->entries[index & (q->size - 1)];
}

/* Maximum slots of a queue that completes in any order: a cookie has no room for more. */
enum { MAX_SLOTS = 0xFFFFFF };

static int grow_once(struct rp_in_flight *q)
{
	size_t size = q->size ? 2 * q->size : 16;
	struct rp_entry *entries = PyMem_Malloc(size * sizeof(*entries));

	if (!entries) {
		PyErr_NoMemory();
		return -1;
	}
	for (size_t i = q->dropped; q->in_order && i != q->end; i++)
		entries[i & (size - 1)] = *at(q, i);
	if (!q->in_order) {
		if (q->size)
			memcpy(entries, q->entries, q->size * sizeof(*entries));
		for (size_t i = size; i-- > q->size;) {
			entries[i] = (struct rp_entry){ .count = q->free };
			q->free = (uint32_t)i + 1;
		}
	}
	PyMem_Free(q->entries);
	q->entries = entries;
	q->size = size;
	return 0;
}

int rp_grow(struct rp_in_flight *q, size_t count)
{
	int failed = 0;

	RP_BEGIN(q);
	if (!q->in_order && count > MAX_SLOTS - q->end) {
		PyErr_Format(PyExc_MemoryError, "at most %d receives of an SRQ can be outstanding",
			     MAX_SLOTS);
		failed = -1;
	}
	while (!failed && q->size - (q->end - q->dropped) < count)
		failed = grow_once(q);
	RP_END();
	return failed;
}

/*
 * The low half of a slot's cookie, never 0: 1 + the slot's index and, in the top byte, its
 * generation, so that a stale cookie finds nothing.
 */
static uint32_t low_half_of_cookie(const struct rp_in_flight *q, size_t index)
{
	return (uint32_t)q->entries[index].generation << 24 | (uint32_t)(index + 1);
}

struct rp_entry *rp_take_slot(struct rp_in_flight *q, uint64_t *cookie)
{
	struct rp_entry *entry = &q->entries[q->free - 1];

	*cookie = q->base | low_half_of_cookie(q, q->free - 1);
	q->free = entry->count;
	q->end++;
	return entry;
}

PyObject *rp_latest_refs(struct rp_in_flight *q)
{
	PyObject *refs = NULL;

	if (!q->in_order)
		return NULL;
	RP_BEGIN(q);
	if (q->end != q->dropped)
		refs = Py_XNewRef(at(q, q->end - 1)->refs);
	RP_END();
	return refs;
}

static int is_there(const struct rp_entry *entry)
{
	return entry->state != RP_FREE && entry->state != RP_DONE;
}

/* In a queue that completes in any order, find a cookie's outstanding entry, or NULL. */
static struct rp_entry *find(const struct rp_in_flight *q, uint64_t cookie)
{
	size_t index = (size_t)(cookie & MAX_SLOTS) - 1;

	return index < q->size && low_half_of_cookie(q, index) == (uint32_t)cookie &&
	       is_there(&q->entries[index]) ? &q->entries[index] : NULL;
}

/* In a queue that completes in any order, retire an entry; rp_drop_done() will release it. */
static void retire(struct rp_in_flight *q, struct rp_entry *entry)
{
	entry->state = RP_DONE;
	entry->count = q->retired;
	q->retired = (uint32_t)(entry - q->entries) + 1;
	q->done++;
}

/*
 * Return a new reference to a work request's wr_id; if it is only a number, set *number and return
 * NULL.
 */
static PyObject *find_wr_id(const struct rp_entry *entry, uint64_t index, uint64_t *number)
{
	PyObject *wr_id = entry->wr_id;

	if (entry->state == RP_ROWS) {
		*number = ((const uint64_t *)(uintptr_t)entry->serial)[index];
		return NULL;
	}
	index += entry->row;
	if (PyBytes_CheckExact(wr_id)) {
		*number = ((const uint64_t *)(const void *)PyBytes_AsString(wr_id))[index];
		return NULL;
	}
	if ((PyObject *)Py_TYPE(wr_id) == rp_sent_type)
		wr_id = PyTuple_GetItem(((struct rp_sent *)wr_id)->wr_ids, (Py_ssize_t)index);
	return Py_NewRef(wr_id);
}

/* Return a work request's wr_id as a new reference; NULL with an exception. */
static PyObject *wr_id_of(const struct rp_entry *entry, uint64_t index)
{
	uint64_t number;
	PyObject *wr_id = find_wr_id(entry, index, &number);

	return wr_id ? wr_id : PyLong_FromUnsignedLongLong(number);
}

void rp_note_invalidated(PyObject *invalidated, uint32_t rkey)
{
	struct rp_error error = rp_save_error();
	PyObject *index, *counts;

	/*
	 * The dict has no closed windows. If memory runs out here, this window still counts as
	 * bound.
	 */
	index = PyLong_FromUnsignedLong(rkey >> 8);
	counts = index ? rp_dict_get(invalidated, index) : NULL;
	rp_count_invalidation(counts, rkey & RP_KEY_BYTE);
	PyErr_Clear();
	Py_XDECREF(counts);
	Py_XDECREF(index);
	rp_restore_error(error);
}

/* A TAG_DEL has succeeded: retire the receive, unless a message matched the receive first. */
static void release(struct rp_in_flight *tagged, uint32_t cookie, uint64_t serial)
{
	struct rp_entry *entry;

	RP_BEGIN(tagged);
	entry = find(tagged, cookie);
	if (entry && entry->serial == serial && entry->state == RP_POSTED)
		retire(tagged, entry);
	RP_END();
}

/*
 * Record a bind's outcome. An error status applies only to the last entry; whether the unsignaled
 * binds that precede it took effect is unknown.
 */
static void note_bind(struct rp_entry *entry, int last, int status)
{
	if (status == IBV_WC_SUCCESS)
		entry->state = entry->state == RP_BIND ? RP_BOUND : RP_UNBOUND;
	else if (last && (status == IBV_WC_MW_BIND_ERR || status == IBV_WC_LOC_QP_OP_ERR ||
			  status == IBV_WC_LOC_PROT_ERR)) {
		entry->state = RP_POSTED;
		rp_take_back_bind((struct rp_handle *)PyTuple_GetItem(entry->refs, 0), entry->key,
				  entry->removes);
	}
}

static int complete_in_order(struct rp_in_flight *q, uint64_t cookie, int status,
			     PyObject **wr_id, uint64_t *number)
{
	uint64_t ahead = (cookie - q->done) & UINT32_MAX;
	int found = 0;

	if (ahead >= q->posted - q->done)
		return 0;
	q->done += ahead + 1;
	while (!found && q->first != q->end) {
		struct rp_entry *entry = at(q, q->first);
		uint64_t left = entry->count - q->begun;

		found = ahead < left;
		if (found)
			*wr_id = find_wr_id(entry, q->begun + ahead, number);
		if (ahead + 1 < left) {
			q->begun += ahead + 1;
			continue;
		}
		q->begun = 0;
		q->first++;
		ahead -= found ? ahead : left;
		if (entry->state >= RP_BIND)
			note_bind(entry, found, status);
		else if (entry->state == RP_LOCAL_INV && status == IBV_WC_SUCCESS)
			entry->state = RP_INVALIDATED;
		/* An error status is the last entry's: if that is a TAG_DEL, it removed nothing. */
		if (entry->removes && q->tagged && (!found || status == IBV_WC_SUCCESS))
			release(q->tagged, entry->removes, entry->serial);
	}
	return found;
}

static int complete_any(struct rp_in_flight *q, uint64_t cookie, PyObject **wr_id,
			uint64_t *number)
{
	struct rp_entry *entry = find(q, cookie);

	if (!entry)
		return 0;
	*wr_id = find_wr_id(entry, 0, number);
	if (entry->state == RP_EARLY)
		entry->state = RP_MATCHED;
	else
		retire(q, entry);
	return 1;
}

int rp_complete(struct rp_in_flight *q, uint64_t cookie, int status, PyObject **wr_id,
		uint64_t *number)
{
	int found;

	RP_BEGIN(q);
	found = q->in_order ? complete_in_order(q, cookie, status, wr_id, number) :
			      complete_any(q, cookie, wr_id, number);
	RP_END();
	return found;
}

void rp_match(struct rp_in_flight *q, uint64_t cookie)
{
	struct rp_entry *entry;

	RP_BEGIN(q);
	entry = q->in_order ? NULL : find(q, cookie);
	if (entry)
		entry->state = RP_EARLY;
	RP_END();
}

int rp_is_outstanding(struct rp_in_flight *q, uint64_t cookie, uint64_t serial)
{
	const struct rp_entry *entry;
	int found;

	RP_BEGIN(q);
	entry = find(q, cookie);
	found = entry && entry->serial == serial;
	RP_END();
	return found;
}

static void free_slot(struct rp_in_flight *q, struct rp_entry *entry)
{
	*entry = (struct rp_entry){ .count = q->free,
				    .generation = (unsigned char)(entry->generation + 1) };
	q->free = (uint32_t)(entry - q->entries) + 1;
	q->end--;
}

/* Remove the next finished entry; return whether there was one. */
static int take_done(struct rp_in_flight *q, struct rp_entry *taken)
{
	int there = 1;

	RP_BEGIN(q);
	if (q->dropped != q->first) {
		*taken = *at(q, q->dropped++);
	} else if (q->retired) {
		struct rp_entry *entry = &q->entries[q->retired - 1];

		*taken = *entry;
		q->retired = entry->count;
		free_slot(q, entry);
	} else {
		there = 0;
	}
	RP_END();
	return there;
}

/* May run any Python code. */
static void release_entry(struct rp_in_flight *q, struct rp_entry *entry)
{
	if (entry->state >= RP_BIND) {
		PyObject *mr = PyTuple_GetItem(entry->refs, 1);

		/* If the outcome is unknown, previously bound regions stay held, as does mr. */
		if (entry->state != RP_UNBIND)
			rp_note_bound((struct rp_handle *)PyTuple_GetItem(entry->refs, 0),
				      entry->state == RP_UNBOUND ? NULL : (struct rp_handle *)mr,
				      entry->state != RP_BIND,
				      (struct rp_bind){ q->binder, entry->serial, entry->removes,
							entry->key });
	}
	if (entry->state == RP_INVALIDATED)
		rp_note_invalidated(q->invalidated, entry->removes);
	rp_unpin_all(entry->refs);
	Py_XDECREF(entry->refs);
	rp_drop_wr_id(entry->wr_id);
}

void rp_drop_all_done(struct rp_in_flight *q)
{
	struct rp_entry entry;

	while (take_done(q, &entry))
		/* release_entry() may recurse, so keep no state across it. */
		release_entry(q, &entry);
	if (q->tagged)
		rp_drop_done(q->tagged);
}

void rp_unrecord(struct rp_in_flight *q, uint64_t cookie, uint64_t count, struct rp_entry *taken)
{
	struct rp_entry *entry;

	taken->wr_id = taken->refs = NULL;
	RP_BEGIN(q);
	if (!q->in_order) {
		entry = find(q, cookie);
		if (entry) {
			*taken = *entry;
			free_slot(q, entry);
			q->posted--;
		}
	} else if (q->end != q->first &&
		   ((cookie + count) & UINT32_MAX) == (q->posted & UINT32_MAX)) {
		entry = at(q, q->end - 1);
		q->posted -= count;
		if (entry->count > count) {
			entry->count -= (uint32_t)count;
		} else {
			*taken = *entry;
			q->end--;
		}
	}
	RP_END();
}

void rp_unrecord_rest(struct rp_in_flight *q, uint64_t first, const uint64_t *cookies, size_t each,
		      size_t from, size_t count)
{
	struct rp_entry taken;

	for (; count > from; count -= each) {
		size_t index = count - each;

		rp_unrecord(q, cookies ? cookies[index] : rp_cookie_at(first, index), each, &taken);
		rp_unpin_all(taken.refs);
		Py_XDECREF(taken.refs);
		rp_drop_wr_id(taken.wr_id);
	}
}

/*
 * Drop the records of a queue's first `posted` work requests after the queue has been destroyed or
 * reset. A queue that completes in any order is never reset, so all its records are dropped.
 */
static void clear(struct rp_in_flight *q, uint64_t posted)
{
	RP_BEGIN(q);
	if (q->in_order) {
		for (; q->first != q->end; q->first++) {
			uint64_t rest = at(q, q->first)->count - q->begun;

			if (q->done + rest > posted)
				break;
			q->done += rest;
			q->begun = 0;
		}
	} else {
		for (size_t i = 0; i < q->size; i++)
			if (is_there(&q->entries[i]))
				retire(q, &q->entries[i]);
	}
	RP_END();
	rp_drop_done(q);
}

/* ---- finding a queue by its number -------------------------------------- */

/*
 * In the dict, a queue's value is a capsule with its address. The queue's dealloc first invalidates
 * the capsule, so the address of a queue without references is never found. Without a GIL, another
 * thread could use the address before the capsule is invalidated, so the value is then a weak
 * reference, which takes longer to follow.
 */
#ifdef Py_GIL_DISABLED
enum { WEAKREFS = Py_TPFLAGS_MANAGED_WEAKREF };
#else
enum { WEAKREFS = 0 };
static const char CAPSULE[] = "rdmapost._verbs.InFlight";
#endif

static PyObject *value_of(struct rp_in_flight *q)
{
#ifdef Py_GIL_DISABLED
	return PyWeakref_NewRef((PyObject *)q, NULL);
#else
	return PyCapsule_New(q, CAPSULE, NULL);
#endif
}

/*
 * The cookie's queue, a new reference; NULL if `value` is not that queue: any code can change the
 * dict.
 */
static struct rp_in_flight *queue_of(PyObject *value, uint64_t cookie)
{
	PyObject *found = NULL;

#ifdef Py_GIL_DISABLED
	if (PyWeakref_Check(value) && PyWeakref_GetRef(value, &found) > 0 &&
	    !PyObject_TypeCheck(found, (PyTypeObject *)rp_in_flight_type))
		Py_CLEAR(found);
#else
	if (PyCapsule_IsValid(value, CAPSULE))
		found = Py_XNewRef(PyCapsule_GetPointer(value, CAPSULE));
#endif
	if (found && ((struct rp_in_flight *)found)->base >> 32 != cookie >> 32)
		Py_CLEAR(found);
	return (struct rp_in_flight *)found;
}

struct rp_in_flight *rp_find_queue(PyObject *queues, uint64_t cookie)
{
	PyObject *number = PyLong_FromUnsignedLong(cookie >> 32), *value;
	struct rp_in_flight *found = NULL;
	Py_ssize_t at = 0;

	if (number) {
		value = rp_dict_get(queues, number);
		Py_DECREF(number);
		if (value)
			found = queue_of(value, cookie);
		Py_XDECREF(value);
		return found;
	}
	/* There was no memory for the key, but a completion must not be lost: search. */
	PyErr_Clear();
	RP_BEGIN(queues);
	while (!found && PyDict_Next(queues, &at, NULL, &value))
		found = queue_of(value, cookie);
	RP_END();
	return found;
}

/*
 * enroll(queues, invalidated): make the queue visible to rp_find_queue(), and count the keys that
 * the queue invalidates.
 */
static PyObject *in_flight_enroll(PyObject *self, PyObject *args)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;
	PyObject *key, *value, *queues, *invalidated;

	if (!PyArg_ParseTuple(args, "OO", &queues, &invalidated))
		return NULL;
	if (!PyDict_CheckExact(queues) || !PyDict_CheckExact(invalidated) || q->queues) {
		PyErr_SetString(PyExc_TypeError, "not a dict, or enrolled already");
		return NULL;
	}
	key = PyLong_FromUnsignedLong(q->base >> 32);
	value = value_of(q);
	if (key && value && !PyDict_SetItem(queues, key, value)) {
		q->queues = Py_NewRef(queues);
		q->key = Py_NewRef(key);
		q->invalidated = Py_NewRef(invalidated);
#ifndef Py_GIL_DISABLED
		q->value = Py_NewRef(value);
#endif
	}
	Py_XDECREF(key);
	Py_XDECREF(value);
	return q->queues ? Py_NewRef(Py_None) : NULL;
}

static void leave(struct rp_in_flight *q)
{
	PyObject *queues = q->queues, *key = q->key, *capsule = q->value;
	struct rp_error error;

	if (!queues)
		return;
	q->queues = q->key = q->value = NULL;
	if (capsule)
		PyCapsule_SetName(capsule, NULL);
	error = rp_save_error();
	if (PyDict_DelItem(queues, key))
		PyErr_Clear();
	rp_restore_error(error);
	Py_DECREF(queues);
	Py_DECREF(key);
	Py_XDECREF(capsule);
}

/* ---- the owner ---------------------------------------------------------- */

/* The queues have been destroyed: drop their records. */
static void forget(PyObject *queues)
{
	for (Py_ssize_t i = 0; i < PyTuple_Size(queues); i++) {
		struct rp_in_flight *q = (struct rp_in_flight *)PyTuple_GetItem(queues, i);

		leave(q);
		clear(q, UINT64_MAX);
	}
}

/*
 * own_queues(handle, queues): closing the handle drops the queues' records, even if Python code
 * fails.
 */
static PyObject *own_queues(PyObject *module, PyObject *args)
{
	struct rp_handle *h;
	PyObject *queues;
	int good;

	(void)module;
	if (!PyArg_ParseTuple(args, "O!O!", rp_handle_type, &h, &PyTuple_Type, &queues))
		return NULL;
	good = !h->queues;
	for (Py_ssize_t i = 0; good && i < PyTuple_Size(queues); i++)
		good = PyObject_TypeCheck(PyTuple_GetItem(queues, i),
					  (PyTypeObject *)rp_in_flight_type);
	if (!good) {
		PyErr_SetString(PyExc_TypeError, "not queues, or the handle already has some");
		return NULL;
	}
	h->forget = forget;
	h->queues = Py_NewRef(queues);
	Py_RETURN_NONE;
}

/* ---- the type ----------------------------------------------------------- */

static PyObject *in_flight_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static uint64_t number;
	static char *names[] = { "in_order", "tagged", NULL };
	PyObject *tagged = Py_None;
	struct rp_in_flight *q;
	int in_order = 1;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|pO", names, &in_order, &tagged))
		return NULL;
	if (tagged != Py_None && !PyObject_TypeCheck(tagged, (PyTypeObject *)rp_in_flight_type)) {
		PyErr_SetString(PyExc_TypeError, "tagged must be an InFlight");
		return NULL;
	}
	q = (struct rp_in_flight *)PyType_GenericAlloc(type, 0);
	if (!q)
		return NULL;
	q->in_order = in_order;
	q->binder = rp_new_binder();
	if (!q->binder) {
		Py_DECREF((PyObject *)q);
		return PyErr_NoMemory();
	}
	if (tagged != Py_None)
		q->tagged = (struct rp_in_flight *)Py_NewRef(tagged);
	/* No two queues of a process share a base. */
	q->base = __atomic_add_fetch(&number, 1, __ATOMIC_RELAXED) << 32;
	return (PyObject *)q;
}

static int in_flight_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;

	Py_VISIT(Py_TYPE(self));
	for (size_t i = q->dropped; i != (q->in_order ? q->end : q->size); i++) {
		Py_VISIT(at(q, i)->wr_id);
		Py_VISIT(at(q, i)->refs);
	}
	Py_VISIT(q->tagged);
	Py_VISIT(q->queues);
	Py_VISIT(q->invalidated);
	return 0;
}

static int in_flight_clear(PyObject *self)
{
	clear((struct rp_in_flight *)self, UINT64_MAX);
	return 0;
}

static void in_flight_dealloc(PyObject *self)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;

	PyObject_GC_UnTrack(self);
	if (WEAKREFS)
		PyObject_ClearWeakRefs(self);
	leave(q);
	clear(q, UINT64_MAX);
	rp_drop_binder(q->binder);
	PyMem_Free(q->entries);
	Py_XDECREF(q->invalidated);
	Py_XDECREF((PyObject *)q->tagged);
	rp_free(self);
}

static PyObject *in_flight_clear_until(PyObject *self, PyObject *arg)
{
	unsigned long long posted = PyLong_AsUnsignedLongLong(arg);

	if (PyErr_Occurred())
		return NULL;
	clear((struct rp_in_flight *)self, posted);
	Py_RETURN_NONE;
}

/*
 * Return the entry of the index-th outstanding work request, and the work request's index in the
 * entry; NULL past the end. Entries are in posting order if the queue completes in order, otherwise
 * in slot order.
 */
static struct rp_entry *outstanding(struct rp_in_flight *q, uint64_t index, uint64_t *within)
{
	if (!q->in_order) {
		for (size_t i = 0; i < q->size; i++)
			if (is_there(&q->entries[i]) && !index--) {
				*within = 0;
				return &q->entries[i];
			}
		return NULL;
	}
	index += q->begun;
	for (size_t i = q->first; i != q->end; i++) {
		if (index < at(q, i)->count) {
			*within = index;
			return at(q, i);
		}
		index -= at(q, i)->count;
	}
	return NULL;
}

/* entry(index): (wr_id, held objects) of an outstanding work request, or None. */
static PyObject *in_flight_entry(PyObject *self, PyObject *arg)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;
	uint64_t index = PyLong_AsUnsignedLongLong(arg), within;
	PyObject *wr_id = NULL, *refs = NULL, *made;
	struct rp_entry *entry;

	if (PyErr_Occurred())
		return NULL;
	RP_BEGIN(q);
	entry = outstanding(q, index, &within);
	if (entry) {
		wr_id = wr_id_of(entry, within);
		refs = entry->refs;
		if ((PyObject *)Py_TYPE(entry->wr_id) == rp_sent_type)
			refs = PyTuple_GetItem(((struct rp_sent *)entry->wr_id)->refs,
				(Py_ssize_t)(entry->row + within));
		Py_XINCREF(refs);
	}
	RP_END();
	if (!entry)
		Py_RETURN_NONE;
	made = wr_id ? PyTuple_Pack(2, wr_id, refs ? refs : Py_None) : NULL;
	Py_XDECREF(wr_id);
	Py_XDECREF(refs);
	return made;
}

/* peek_queues(queues, cookie): the wr_id of an outstanding work request, or None. */
static PyObject *peek_queues(PyObject *module, PyObject *args)
{
	struct rp_entry *entry;
	struct rp_in_flight *q;
	unsigned long long cookie;
	PyObject *queues, *wr_id = NULL;
	uint64_t within = 0;

	(void)module;
	if (!PyArg_ParseTuple(args, "O!K", &PyDict_Type, &queues, &cookie))
		return NULL;
	q = rp_find_queue(queues, cookie);
	if (!q)
		Py_RETURN_NONE;
	RP_BEGIN(q);
	entry = q->in_order ? outstanding(q, (cookie - q->done) & UINT32_MAX,
					  &within) : find(q, cookie);
	if (entry)
		wr_id = wr_id_of(entry, within);
	RP_END();
	Py_DECREF((PyObject *)q);
	return entry ? wr_id : Py_NewRef(Py_None);
}

static PyObject *in_flight_outstanding(PyObject *self, void *unused)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;

	(void)unused;
	return PyLong_FromUnsignedLongLong(q->posted - q->done);
}

static PyObject *in_flight_posted(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(((struct rp_in_flight *)self)->posted);
}

static PyMethodDef in_flight_methods[] = {
	{ "enroll", in_flight_enroll, METH_VARARGS, NULL },
	{ "entry", in_flight_entry, METH_O, NULL },
	{ "clear_until", in_flight_clear_until, METH_O,
	  "Forget the first `posted` work requests: the queue has been reset since." },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef in_flight_getset[] = {
	{ "outstanding", in_flight_outstanding, NULL, NULL, NULL },
	{ "posted", in_flight_posted, NULL, NULL, NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot in_flight_slots[] = {
	{ Py_tp_new, in_flight_new },
	{ Py_tp_dealloc, in_flight_dealloc },
	{ Py_tp_traverse, in_flight_traverse },
	{ Py_tp_clear, in_flight_clear },
	{ Py_tp_methods, in_flight_methods },
	{ Py_tp_getset, in_flight_getset },
	{ 0, NULL },
};

/* ---- a prepared list in flight ------------------------------------------ */

PyObject *rp_make_sent(PyObject *wr_ids, PyObject *refs)
{
	struct rp_sent *sent = NULL;

	if (refs)
		sent = (struct rp_sent *)PyType_GenericAlloc((PyTypeObject *)rp_sent_type, 0);
	if (!sent) {
		Py_XDECREF(wr_ids);
		Py_XDECREF(refs);
		return NULL;
	}
	sent->wr_ids = wr_ids;
	sent->refs = refs;
	sent->owners = 1;
	rp_pin_all(refs);
	return (PyObject *)sent;
}

PyObject *rp_own_sent(PyObject *sent)
{
	RP_ADD(&((struct rp_sent *)sent)->owners, 1);
	return Py_NewRef(sent);
}

void rp_drop_wr_id(PyObject *wr_id)
{
	if (wr_id && (PyObject *)Py_TYPE(wr_id) == rp_sent_type &&
	    !RP_ADD(&((struct rp_sent *)wr_id)->owners, -1))
		rp_unpin_all(((struct rp_sent *)wr_id)->refs);
	Py_XDECREF(wr_id);
}

static int sent_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct rp_sent *)self)->wr_ids);
	Py_VISIT(((struct rp_sent *)self)->refs);
	return 0;
}

static void sent_dealloc(PyObject *self)
{
	struct rp_sent *sent = (struct rp_sent *)self;

	PyObject_GC_UnTrack(self);
	Py_XDECREF(sent->wr_ids);
	Py_XDECREF(sent->refs);
	rp_free(self);
}

static PyType_Slot sent_slots[] = {
	{ Py_tp_dealloc, sent_dealloc },
	{ Py_tp_traverse, sent_traverse },
	{ 0, NULL },
};

static PyMethodDef functions[] = {
	{ "peek_queues", peek_queues, METH_VARARGS, NULL },
	{ "own_queues", own_queues, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_in_flight(PyObject *module)
{
	return PyModule_AddFunctions(module, functions) ||
	       rp_add_type(module, "rdmapost._verbs.Sent", sizeof(struct rp_sent),
			   Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, sent_slots, &rp_sent_type) ||
	       rp_add_type(module, "rdmapost._verbs.InFlight", sizeof(struct rp_in_flight),
			   Py_TPFLAGS_HAVE_GC | WEAKREFS, in_flight_slots, &rp_in_flight_type) ? -1 : 0;
}
